"""Concatenate sequences of documents without copying them."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any


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
