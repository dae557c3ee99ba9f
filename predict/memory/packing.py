"""Computes how much memory buffers take once each of them has an address.

XLA assigns addresses to a step's temporary buffers by size: the largest first, each into the
smallest hole that is free throughout its lifetime, or else on top of the others. Buffers with
different lifetimes leave holes that nothing fits into, so the total exceeds the largest amount that
is alive at any one time. Here, at most 18 bytes are alive at once, but 20 are needed:

    buffer    bytes   alive       address
    first     8       [0, 2)      0
    second    8       [1, 3)      8
    third     6       [2, 6)      0       in the hole of 8 that `first` leaves
    fourth    4       [2, 3)      16      the hole of 2 above `third` is too small for it
"""

import dataclasses
import itertools
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """A buffer of `num_bytes` bytes that is alive from `start` until just before `end`."""

    num_bytes: int
    start: int
    end: int

    def overlaps(self, other: "Lifetime") -> bool:
        """Return whether both buffers are alive at some time."""
        return self.start < other.end and other.start < self.end


def packed_bytes(buffers: Iterable[Lifetime]) -> int:
    """Return the size of the address range of buffers that are placed by XLA's best-fit rule.

    Source: XLA, `xla/service/heap_simulator`, `GlobalDecreasingSizeBestFitHeap`; the order and the
    rule are the same.
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
    """Return the largest number of bytes that are alive at the same time."""
    changes = []
    for buffer in buffers:
        changes += [(buffer.start, buffer.num_bytes), (buffer.end, -buffer.num_bytes)]
    changes.sort()  # negative changes first: at equal times, buffers end before others start
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _best_fit(num_bytes: int, taken: Iterable[tuple[int, int]]) -> int:
    """Return the start of the smallest free hole, or else the first address above everything.

    Args:
        num_bytes: size of the buffer to place.
        taken: (first, last + 1) addresses of occupied ranges, sorted; they may overlap.
    """
    best = None
    smallest = None
    free = 0
    for first, end in taken:
        hole = first - free
        if hole >= num_bytes and (smallest is None or hole < smallest):
            best = free
            smallest = hole
        free = max(free, end)
    return free if best is None else best
