"""Rows of a corpus put together to batches that do not depend on who reads them.

R: rows of the global batch that this process supplies.
"""

import sys
from collections.abc import Callable, Sequence
from typing import cast

import grain
import numpy as np

from data.config import DataConfig
from data.examples import Batch, ConcatExamples, Corpus, Examples
from data.mixture import mixed_order

# Batches read ahead of the step: enough to hide one slow read of a network disk.
_PREFETCHED_BATCHES = 8
# Of these, large ones are fewer: so many bytes of this process's rows, but one batch at least.
_PREFETCHED_BYTES = 2**30


def train_batches(
    corpus: Corpus, config: DataConfig, rows: Sequence[int]
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over this process's rows of the shuffled train batches.

    Row r of step k is element k * global_batch_size + r of one endless stream, shuffled anew each
    epoch, whatever the number of processes. The iterator's state counts steps, nothing else, so a
    state saved by one process continues any number of them.

    Args:
        corpus: Where the rows come from.
        config: Batch size, seed and threads.
        rows: Which rows of the global batch, 0 to global_batch_size - 1, in the wanted order.

    Returns:
        Batches of what `batch_shapes` tells, with R rows of each, and index: uint32[R], the
        element's number modulo 2**32, which tells one example from the next in any order.
    """
    check_rows(rows, config.global_batch_size)
    examples, order = corpus.train, _order(corpus.train, config)

    def read(elements: Sequence[int]) -> Batch:
        # What is random hangs on seed and element alone, and so differs from epoch to epoch.
        return examples.train_batch(elements, order, config.seed)

    num_batches = sys.maxsize // config.global_batch_size
    return _iterate(read, config, rows, num_batches, examples.row_bytes)


def validation_batches(
    corpus: Corpus, config: DataConfig, rows: Sequence[int], num_batches: int | None = None
) -> grain.DatasetIterator[Batch]:
    """Returns an iterator over this process's rows of the validation batches, in order, once.

    Every row comes exactly once; rows of weight 0 fill the last batch.

    Args:
        corpus: Where the rows come from; an empty validation split gives no batches.
        config: Batch size and threads.
        rows: Which rows of the global batch, 0 to global_batch_size - 1, in the wanted order.
        num_batches: At most so many; all of them by default.

    Returns:
        Batches as those of `train_batches`, their `index` the row's number.
    """
    check_rows(rows, config.global_batch_size)
    examples, size = corpus.validation, config.global_batch_size

    def read(elements: Sequence[int]) -> Batch:
        is_there = np.array([element < len(examples) for element in elements])
        # Where there is none, any row tells the shapes.
        present = [element for element in elements if element < len(examples)] or [0]
        return _spread(examples.evaluation_batch(present), is_there)

    all_batches = -(-len(examples) // size)
    num_batches = all_batches if num_batches is None else min(num_batches, all_batches)
    return _iterate(read, config, rows, num_batches, examples.row_bytes)


def batches_ahead(batch_bytes: int) -> int:
    """Returns how many batches of this size are read ahead of the step."""
    return max(1, min(_PREFETCHED_BATCHES, _PREFETCHED_BYTES // max(batch_bytes, 1)))


def check_rows(rows: Sequence[int], global_batch_size: int) -> None:
    """Checks that all rows are different rows of the global batch.

    Raises:
        ValueError: They are not.
    """
    if (
        len(rows) == 0
        or len(set(rows)) != len(rows)
        or not 0 <= min(rows) <= max(rows) < global_batch_size
    ):
        raise ValueError(
            f"rows={list(rows)} must be different numbers from 0 to data.global_batch_size - 1 = "
            f"{global_batch_size - 1}, at least one; pass the rows that this process holds"
        )


def _spread(batch: Batch, is_there: np.ndarray) -> Batch:
    """Returns the batch's rows at the places where there are some, zeros at the others."""
    if is_there.all():
        return batch
    spread = {}
    for name, values in batch.items():
        spread[name] = np.zeros((len(is_there), *values.shape[1:]), values.dtype)
        spread[name][is_there] = values[: is_there.sum()]
    return spread


def _order(examples: Examples, config: DataConfig) -> Callable[[int], int]:
    """Returns what tells the row that each element of the endless stream is."""
    # Grain adds the epoch to the seed; hashing keeps seed 1 from being seed 0 an epoch later.
    seed = int(np.random.SeedSequence(config.seed).generate_state(1)[0])

    def shuffled(length: int) -> Callable[[int], int]:
        order = grain.MapDataset.range(length).shuffle(seed=seed).repeat()
        return cast(Callable[[int], int], order.__getitem__)

    if isinstance(examples, ConcatExamples):
        orders = [shuffled(len(part)) for part in examples.parts]
        return mixed_order(config, orders, examples.offsets)
    return shuffled(len(examples))


def _iterate(
    read: Callable[[Sequence[int]], Batch],
    config: DataConfig,
    rows: Sequence[int],
    num_batches: int,
    row_bytes: int,
) -> grain.DatasetIterator[Batch]:
    """Returns an iterator over this process's rows of batches; its state counts steps.

    Args:
        read: Returns the rows that elements are; row r of batch k is element
            k * global_batch_size + r.
        config: Batch size and threads.
        rows: Which rows of the global batch.
        num_batches: After which it ends.
        row_bytes: Of each row.
    """
    num_ahead = batches_ahead(len(rows) * row_bytes)
    batches = _Batches(read, config.global_batch_size, rows, num_batches)
    options = grain.ReadOptions(
        num_threads=min(config.num_threads, num_ahead), prefetch_buffer_size=num_ahead
    )
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


class _Batches(Sequence[Batch]):
    """This process's rows of batch k, by k.

    Args:
        read: Returns the rows that elements are.
        global_batch_size: Elements a batch.
        rows: Which of them to supply.
        num_batches: The length.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Batch],
        global_batch_size: int,
        rows: Sequence[int],
        num_batches: int,
    ):
        self._read, self._rows = read, tuple(int(row) for row in rows)
        self._global_batch_size, self._num_batches = global_batch_size, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        elements = [index * self._global_batch_size + row for row in self._rows]
        batch = self._read(elements)
        batch["index"] = np.array([element % 2**32 for element in elements], np.uint32)
        return batch
