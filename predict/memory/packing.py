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

import numpy as np


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """A buffer of `num_bytes` bytes that is alive from `start` until just before `end`."""

    num_bytes: int
    start: int
    end: int


def packed_bytes(buffers: Iterable[Lifetime]) -> int:
    """Return the size of the address range of buffers that are placed by XLA's best-fit rule.

    Source: XLA, `xla/service/heap_simulator`, `GlobalDecreasingSizeBestFitHeap`; the order and the
    rule are the same.
    """
    ordered = sorted(buffers, key=lambda b: (-b.num_bytes, b.start))
    starts = np.array([buffer.start for buffer in ordered])
    ends = np.array([buffer.end for buffer in ordered])
    sizes = np.array([buffer.num_bytes for buffer in ordered])
    addresses = np.zeros(len(ordered), np.int64)
    for i in range(len(ordered)):
        is_neighbour = (starts[:i] < ends[i]) & (starts[i] < ends[:i])
        taken = addresses[:i][is_neighbour]
        addresses[i] = _best_fit(sizes[i], taken, taken + sizes[:i][is_neighbour])
    return int((addresses + sizes).max(initial=0))


def most_bytes_at_once(buffers: Iterable[Lifetime]) -> int:
    """Return the largest number of bytes that are alive at the same time."""
    changes = []
    for buffer in buffers:
        changes += [(buffer.start, buffer.num_bytes), (buffer.end, -buffer.num_bytes)]
    changes.sort()  # negative changes first: at equal times, buffers end before others start
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _best_fit(num_bytes: int, firsts: np.ndarray, ends: np.ndarray) -> int:
    """Return the start of the smallest free hole, or else the first address above everything.

    Args:
        num_bytes: size of the buffer to place.
        firsts: first addresses of occupied ranges; the ranges may overlap.
        ends: their last addresses + 1.
    """
    order = np.argsort(firsts)
    free = np.maximum.accumulate(np.concatenate(([0], ends[order])))  # below the ith range
    holes = firsts[order] - free[:-1]
    fits = np.flatnonzero(holes >= num_bytes)
    return free[fits[np.argmin(holes[fits])] if len(fits) else -1]
