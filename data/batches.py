"""Rows put together to batches, read ahead in threads.

R: rows of the global batch that this process supplies.
"""

from collections.abc import Callable, Sequence

import grain
import numpy as np

from data.config import DataConfig
from data.examples import Batch, Example

# Batches read ahead of the step: enough to hide one slow read of a network disk.
_PREFETCHED_BATCHES = 8


def iterate(
    read: Callable[[int], Example], config: DataConfig, rows: Sequence[int], num_batches: int
) -> grain.DatasetIterator[Batch]:
    """Returns an iterator over this process's rows of batches; its state counts steps.

    Args:
        read: Returns the row that an element is; row r of batch k is element
            k * global_batch_size + r.
        config: Batch size and threads.
        rows: Which rows of the global batch.
        num_batches: After which it ends.
    """
    options = grain.ReadOptions(
        num_threads=config.num_threads, prefetch_buffer_size=_PREFETCHED_BATCHES
    )
    batches = _Batches(read, config.global_batch_size, rows, num_batches)
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


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


class _Batches(Sequence[Batch]):
    """This process's rows of batch k, by k.

    Args:
        read: Returns the row that an element is.
        global_batch_size: Elements a batch.
        rows: Which of them to supply.
        num_batches: The length.
    """

    def __init__(
        self,
        read: Callable[[int], Example],
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
        examples = [self._read(element) for element in elements]
        batch = {name: np.stack([row[name] for row in examples]) for name in examples[0]}
        batch["index"] = np.array([element % 2**32 for element in elements], np.uint32)
        return batch
