"""Rows of batches by number, and what is random in them."""

import abc
import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Example = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]

# What the keys of rows begin with, so that no two kinds of draws share one: rows of the train
# stream, rows of evaluations, and pairs of rows that are mixed.
TRAIN, EVALUATION, PAIR = 0, 1, 2
# A label as the data has it.
Label = str | int


class BrokenExample(ValueError):
    """An example that could be read before the first step, and no longer."""


class Examples(abc.ABC):
    """The rows that batches are made of, before they are put in order."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row where they are many; 0 where any number of batches is small."""
        return 0

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

    def train_batch(self, elements: Sequence[int], order: Callable[[int], int], seed: int) -> Batch:
        """Returns the rows of elements of the endless train stream, put together.

        Args:
            elements: Their numbers in the stream, at least one.
            order: Tells which row comes at each place of a stream of all rows, shuffled.
            seed: Of all that is random in the rows, together with the element's number.
        """
        return stack([self.example(order(e), (TRAIN, seed, e)) for e in elements])

    def evaluation_batch(self, indices: Sequence[int]) -> Batch:
        """Returns rows as evaluations see them, put together; at least one."""
        return stack([self[index] for index in indices])

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")


class ConcatExamples(Examples):
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


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a run trains on and is evaluated on.

    Attributes:
        train: Rows of the train split.
        validation: All rows of the validation split; empty where nothing is held out.
        fingerprint: A hash of all that is read. Processes whose fingerprints differ would train on
            different data.
        labels: Of classification, in the order of `targets`; empty with other objectives.
    """

    train: Examples
    validation: Examples
    fingerprint: str
    labels: tuple[Label, ...] = ()

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the tokenizer; None if the corpus has none."""
        return None


def stack(rows: Sequence[Example]) -> Batch:
    """Returns the rows as one array for each key."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def generator(key: tuple[int, ...]) -> np.random.Generator:
    """Returns the source of all that is random in the row of this key."""
    return np.random.default_rng(key)
