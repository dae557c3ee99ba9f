"""The rows that batches are made of, addressed by number, with reproducible randomness.

A row is drawn from its number and a random key alone, never from a global generator. Therefore any
process, thread or worker builds the same row, in any order, also after a restart.
"""

import abc
import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

Example = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]

# The first entry of a random key. It keeps these kinds of draws independent of each other: rows of
# the train stream, rows of evaluations, pairs of rows that are mixed with each other, and the order
# of the rows in a block of a streamed corpus.
TRAIN = 0
EVALUATION = 1
PAIR = 2
BLOCK = 3
# A label as it is stored in the data.
Label = str | int


class BrokenExample(ValueError):
    """Raised when an example that was readable before the first step no longer is."""


class Examples(abc.ABC):
    """The rows of a split, in the order in which they are stored; shuffling happens elsewhere."""

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes; 0 for rows so small that they do not limit prefetching."""
        return 0

    @property
    def fill_rate(self) -> float | None:
        """Share of the tokens of all rows that are not padding; None if rows are not packed."""
        return None

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`, with the keys, shapes and dtypes that data/shapes.py gives.

        Args:
            index: number of the row, 0 to len - 1.
            key: random key; everything random in the row is drawn from it alone.
        """

    def __getitem__(self, index: int) -> Example:
        """Return row `index` as evaluations read it: its randomness depends on `index` alone."""
        self._check(index)
        return self.example(index, (EVALUATION, index))

    def train_batch(self, elements: Sequence[int], order: Callable[[int], int], seed: int) -> Batch:
        """Return a batch of elements of the endless train stream.

        Args:
            elements: numbers of the elements in the stream, at least one.
            order: maps the number of an element to the number of a row; a shuffle.
            seed: with the number of the element, the seed of everything random in its row.
        """
        return stack([self.example(order(e), (TRAIN, seed, e)) for e in elements])

    def evaluation_batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of rows as evaluations read them.

        Args:
            indices: numbers of the rows, at least one.
        """
        return stack([self[index] for index in indices])

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")


class NoExamples(Examples):
    """A split without rows."""

    def __len__(self) -> int:
        return 0

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Raise an error: there is no row."""
        raise IndexError(f"example {index} of 0")


class CheckedExamples(Examples):
    """The rows of a source, after a check before each of them.

    Args:
        check: raises an error if the source has turned out to be damaged.
    """

    def __init__(self, rows: Examples, check: Callable[[], None]):
        self.rows = rows
        self._check_source = check

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fill_rate(self) -> float | None:
        """Share of the tokens of all rows that are not padding; None if rows are not packed."""
        return self.rows.fill_rate

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index` of the source; see `Examples.example`."""
        self._check_source()
        return self.rows.example(index, key)


class ConcatExamples(Examples):
    """The concatenation of several sources.

    Attributes:
        offsets: number of each source's first row, then the total number of rows.
    """

    def __init__(self, parts: Sequence[Examples]):
        self.parts = tuple(parts)
        self.offsets = [0, *itertools.accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.offsets[-1]

    @property
    def fill_rate(self) -> float | None:
        """Share of the tokens of all rows that are not padding; None if rows are not packed."""
        filled = [len(part) * part.fill_rate for part in self.parts if part.fill_rate is not None]
        return sum(filled) / len(self) if len(filled) == len(self.parts) else None

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index` of the concatenation; see `Examples.example`."""
        part, number = self._find(index)
        return part.example(number, key)

    def __getitem__(self, index: int) -> Example:
        """Return row `index` as evaluations read it, with the key of its own source.

        A row is therefore the same whether its source is evaluated alone or in a mixture.
        """
        self._check(index)
        part, number = self._find(index)
        return part[number]

    def _find(self, index: int) -> tuple[Examples, int]:
        source = bisect.bisect_right(self.offsets, index) - 1
        return self.parts[source], index - self.offsets[source]


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """A place in a streamed corpus.

    Attributes:
        shard: number of the shard in the endless order of shards.
        offset: number of the shard's tokens before the place.
    """

    shard: int
    offset: int


class ExampleStream(abc.ABC):
    """The rows of a train split that does not fit on the disk, read block by block.

    How many rows it has is not known before all of them have been read.

    Attributes:
        num_shards: files that the rows come from; each is read once per epoch.
        description: size of the stream, for the summary of a run.
    """

    num_shards: int
    description: str

    @abc.abstractmethod
    def read_block(
        self, start: StreamPosition, order: Callable[[int], int]
    ) -> tuple[Examples, StreamPosition]:
        """Return the rows of the block that starts at a position, at least one, and its end.

        Args:
            start: end of an earlier block; or shard 0, offset 0.
            order: maps a number in the endless order to the number of a shard.

        Raises:
            BrokenExample: A shard cannot be read.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop reading ahead. A call of `read_block` that waits for a shard raises an error."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The data that a run trains on and is evaluated on.

    Attributes:
        validation: rows of the validation set without a name; empty if there is none.
        named_validation: name -> rows, for validation sets that the config names.
        stream: training data in place of `train`, which is then empty; None if it is not streamed.
        fingerprint: hash of all data that is read. Processes whose fingerprints differ would
            train on different data. It covers the sizes of image files, not their contents.
        contents: with `data.verify=full`, a hash of the contents that `fingerprint` does not cover;
            otherwise empty.
        labels: labels of a classification objective, indexed by `targets`; empty for other
            objectives.
    """

    train: Examples
    validation: Examples
    fingerprint: str
    contents: str = ""
    labels: tuple[Label, ...] = ()
    named_validation: Mapping[str, Examples] = field(default_factory=dict)
    stream: ExampleStream | None = None

    @property
    def validation_sets(self) -> dict[str, Examples]:
        """Name -> rows of every validation set that is not empty; "" is the one without a name."""
        sets = {"": self.validation, **self.named_validation}
        return {name: rows for name, rows in sets.items() if len(rows)}

    def with_validation(self, sets: Mapping[str, Examples]) -> Self:
        """Return the corpus with other validation sets, by name, of which "" has none."""
        named = {name: rows for name, rows in sets.items() if name}
        return replace(self, validation=sets.get("", NoExamples()), named_validation=named)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer; None if the corpus has no tokenizer."""
        return None


def stack(rows: Sequence[Example]) -> Batch:
    """Stack rows into a batch: one array per key, with a new leading axis."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def generator(key: tuple[int, ...]) -> np.random.Generator:
    """Return the random number generator of a key."""
    return np.random.default_rng(key)
