"""Rows of batches by number, and what is random in them."""

import abc
import bisect
import itertools
from collections.abc import Sequence

import numpy as np

Example = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]

# What train_batches' and evaluations' draws begin with, so that they share none.
TRAIN, EVALUATION = 0, 1


class Examples(abc.ABC):
    """The rows that batches are made of, before they are put in order."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Returns row `index`, with the keys and shapes that `batch_shapes` tells.

        Args:
            index: 0 to len - 1.
            key: What is random in the row is drawn from this alone.
        """

    def __getitem__(self, index: int) -> Example:
        """Returns row `index` as evaluations see it: what is random hangs on `index` alone."""
        self._check(index)
        return self.example(index, (EVALUATION, index))

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")


class Joined(Examples):
    """Several sources one after another.

    Attributes:
        parts: The sources.
        offsets: The number of the first row of each, and of all rows.
    """

    def __init__(self, parts: Sequence[Examples]):
        self.parts = tuple(parts)
        self.offsets = [0, *itertools.accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.offsets[-1]

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        part, number = self._find(index)
        return part.example(number, key)

    def __getitem__(self, index: int) -> Example:
        """Returns row `index` as its own source gives it to evaluations."""
        self._check(index)
        part, number = self._find(index)
        return part[number]

    def _find(self, index: int) -> tuple[Examples, int]:
        source = bisect.bisect_right(self.offsets, index) - 1
        return self.parts[source], index - self.offsets[source]


def generator(key: tuple[int, ...]) -> np.random.Generator:
    """Returns the source of all that is random in the row of this key."""
    return np.random.default_rng(key)
