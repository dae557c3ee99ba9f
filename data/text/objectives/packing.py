"""Packs items of different lengths, such as conversations or documents, into rows of T tokens.

With T=8 and items of 5, 4, 3, 2 and 2 tokens:

    in order    aaaaa...  bbbbccc.  ddee....     16 of 24 tokens are filled
    best fit    aaaaaccc  bbbbddee               16 of 16

Best fit takes the items from the longest to the shortest, and puts each into the fullest row that
has room for it. The rows depend only on the lengths.

Source: Ding et al. 2024 (arXiv:2404.10830), "Fewer truncations improve language modeling".
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.examples import Examples


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The items of each row.

    Attributes:
        items: int64[number of items], their numbers, row by row.
        firsts: int64[number of rows + 1], position of each row's first item in `items`, then the
            number of items.
        fill_rate: share of the tokens of all rows that are filled; NaN without rows.
    """

    items: np.ndarray
    firsts: np.ndarray
    fill_rate: float

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def items_of(self, row: int) -> np.ndarray:
        """Return int64[items of the row], their numbers."""
        return self.items[self.firsts[row] : self.firsts[row + 1]]


class PackedExamples(Examples):
    """Rows of several items; a subclass sets `_packing`."""

    _packing: Packing

    def __len__(self) -> int:
        return len(self._packing)

    @property
    def fill_rate(self) -> float:
        """Share of the tokens of all rows that are not padding."""
        return self._packing.fill_rate


def pack(
    sizes: np.ndarray, length: int, *, best_fit: bool = False, max_items: int | None = None
) -> Packing:
    """Pack items into rows.

    Args:
        sizes: int64[number of items], tokens of each item, at most `length`.
        length: T.
        best_fit: whether items change their order to fill the rows.
        max_items: most items of a row; None for any number.
    """
    rows = _best_fit(sizes, length, max_items) if best_fit else _in_order(sizes, length, max_items)
    num_tokens = len(rows) * length
    return Packing(
        items=np.array([item for row in rows for item in row], np.int64),
        firsts=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        fill_rate=int(sizes.sum()) / num_tokens if num_tokens else float("nan"),
    )


def _in_order(sizes: Iterable[int], length: int, max_items: int | None) -> list[list[int]]:
    """Put each item into the current row if it fits, or into a new one."""
    rows: list[list[int]] = []
    room = 0
    for number, size in enumerate(sizes):
        if not rows or size > room or len(rows[-1]) == max_items:
            rows.append([])
            room = length
        rows[-1].append(number)
        room -= size
    return rows


def _best_fit(sizes: np.ndarray, length: int, max_items: int | None) -> list[list[int]]:
    rows: list[list[int]] = []
    # Rows with this much room, the last one opened at the end; and all such amounts, sorted.
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms: list[int] = []
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect.bisect_left(rooms, size)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(place)
        else:
            room = length
            row = len(rows)
            rows.append([])
        rows[row].append(number)
        room -= size
        if room and len(rows[row]) != max_items:
            if not with_room[room]:
                bisect.insort(rooms, room)
            with_room[room].append(row)
    return rows
