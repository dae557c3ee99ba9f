"""How much memory buffers take together once each has an address.

XLA gives addresses to the temporaries of a step by size: the largest first, each into the smallest
hole that is free for as long as it lives, or else on top. Buffers of different lives leave holes
that nothing fits into, so the whole is more than what lives at any one moment.
"""

import dataclasses
import itertools
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """A buffer of so many bytes, alive from `start` until just before `end`."""

    num_bytes: int
    start: int
    end: int

    def overlaps(self, other: "Lifetime") -> bool:
        return self.start < other.end and other.start < self.end


def packed_bytes(buffers: Iterable[Lifetime]) -> int:
    """Returns the bytes from the first address to the last, as XLA's best fit by size gives them.

    The order and the rule are those of `GlobalDecreasingSizeBestFitHeap` in XLA's
    `xla/service/heap_simulator`.
    """
    placed: list[tuple[int, Lifetime]] = []
    top = 0
    for buffer in sorted(buffers, key=lambda b: (-b.num_bytes, b.start)):
        neighbours = sorted(
            (address, address + other.num_bytes)
            for address, other in placed
            if buffer.overlaps(other)
        )
        address = _best_fit(buffer.num_bytes, neighbours)
        placed.append((address, buffer))
        top = max(top, address + buffer.num_bytes)
    return top


def most_bytes_at_once(buffers: Iterable[Lifetime]) -> int:
    """Returns the bytes of the buffers that live at the moment when most do."""
    changes = []
    for buffer in buffers:
        changes += [(buffer.start, buffer.num_bytes), (buffer.end, -buffer.num_bytes)]
    changes.sort()  # what goes at a moment goes before what comes at it
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _best_fit(num_bytes: int, taken: Iterable[tuple[int, int]]) -> int:
    """Returns the address of the smallest hole between what is taken, or the first one above it.

    Args:
      taken: (first, last + 1) addresses, in order; they may overlap.
    """
    best, smallest, free = None, None, 0
    for first, end in taken:
        hole = first - free
        if hole >= num_bytes and (smallest is None or hole < smallest):
            best, smallest = free, hole
        free = max(free, end)
    return free if best is None else best
