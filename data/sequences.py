"""Sequences whose items are read on access, and concatenations of them without copies."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any


class LazySequence(Sequence[Any]):
    """A sequence whose items are read on access.

    Args:
        size: number of items.
        read: returns the item at a position, from 0 to `size - 1`.
    """

    def __init__(self, size: int, read: Callable[[int], Any]):
        self._positions = range(size)
        self._read = read

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._read(self._positions[index])


class ConcatDocuments(Sequence[Any]):
    """A range of the concatenation of several sequences.

    Args:
        positions: positions in the concatenation to keep; None keeps all of them.
    """

    def __init__(self, parts: Sequence[Sequence[Any]], positions: range | None = None):
        self._parts = parts
        self._offsets = [0, *itertools.accumulate(map(len, parts))]
        self._positions = range(self._offsets[-1]) if positions is None else positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        position = self._positions[index]
        part = bisect.bisect_right(self._offsets, position) - 1
        return self._parts[part][position - self._offsets[part]]


def hold_out_last(parts: Sequence[Sequence[Any]], fraction: float) -> dict[str, Sequence[Any]]:
    """Split the concatenation of several sequences, of which the last items are for validation.

    At least one item is held out, unless `fraction` is 0.
    """
    positions = range(sum(map(len, parts)))
    num_held = max(round(len(positions) * fraction), 1) if fraction else 0
    num_train = max(len(positions) - num_held, 0)
    return {
        "train": ConcatDocuments(parts, positions[:num_train]),
        "validation": ConcatDocuments(parts, positions[num_train:]),
    }
