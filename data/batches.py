"""Batches that do not depend on the number of processes that read them.

The train split is one endless shuffled stream of elements. Row r of step k is element
k * global_batch_size + r, no matter which process supplies it. (In a run whose batches grow, the
elements of earlier steps are counted by data/batch_sizes.py.) For example, with a global batch of 4
read by two processes:

    step            0         |  1         |  2
    element         0  1  2  3|  4  5  6  7|  8  9 10 11 ...
    read by process 0  0  1  1|  0  0  1  1|  0  0  1  1 ...

R: rows of the global batch that this process supplies.
"""

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import cast

import grain
import numpy as np

from data.batch_sizes import BatchSizes, rows_of_size
from data.config import DataConfig
from data.examples import Batch, ConcatExamples, Corpus, Examples
from data.image_config import ImageConfig
from data.mixture import mixed_order
from data.stream_batches import ReadAhead, StreamBatches

# Number of batches read ahead of the step: enough to hide one slow read from a network disk.
_PREFETCHED_BATCHES = 8
# Fewer large batches are read ahead: at most this many bytes of this process's rows, but always at
# least one batch.
_PREFETCHED_BYTES = 2**30


def train_batches(
    corpus: Corpus, config: DataConfig, rows: Sequence[int], *, seed: int
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator over this process's rows of the shuffled train batches.

    A step continues one endless stream, which is reshuffled each epoch, after the elements of
    earlier steps, for any number of processes. The state of the iterator is the number of steps and
    nothing else, so a state saved by one process can be restored by any number of processes. The
    state for a streamed corpus has a position in its shards, too (data/stream_batches.py).

    Args:
        rows: rows of a full global batch that this process supplies, each from 0 to
            global_batch_size - 1, in the order in which they are returned. While the batch size
            grows, the process supplies the same share of each batch (`rows_of_size`).
        seed: seed of shuffling, masking and image transforms, from 0 to 2**32 - 1.

    Returns:
        An iterator over batches with the keys of `data.shapes.example_shapes`, R rows each, and
        `index: uint32[R]`, the number of the element modulo 2**32, which identifies an example
        regardless of the order of the rows.

    Raises:
        ValueError: `rows` are not distinct rows of the global batch.
    """
    check_rows(rows, config.global_batch_size)
    if corpus.stream is not None:
        order = _shuffled(corpus.stream.num_shards, seed)
        batches = StreamBatches(corpus.stream, order, rows, config.batch_sizes, seed)
        return ReadAhead(batches, batches_ahead(0))
    examples = corpus.train
    order = _order(corpus.train, config, seed)

    def read(elements: Sequence[int]) -> Batch:
        # Randomness depends only on the seed and the element, which has a new number in each epoch.
        return examples.train_batch(elements, order, seed)

    num_batches = sys.maxsize // config.global_batch_size
    return _iterate(read, config, config.batch_sizes, rows, num_batches, examples.row_bytes)


def validation_batches(
    corpus: Corpus,
    config: DataConfig,
    rows: Sequence[int],
    num_batches: int | None = None,
    *,
    name: str = "",
) -> grain.DatasetIterator[Batch]:
    """Return an iterator over this process's rows of the batches of a validation set, in order.

    The iterator yields every row exactly once, and fills the last batch with rows of weight 0.

    Args:
        corpus: corpus to read; an empty validation set gives no batches.
        rows: rows of the global batch that this process supplies, each from 0 to
            global_batch_size - 1, in the order in which they are returned.
        num_batches: maximum number of batches; None for all of them.
        name: name of the set; "" for the one without a name.

    Returns:
        An iterator over batches with the same keys as in `train_batches`; `index` is the number of
        the row in the split.

    Raises:
        ValueError: `rows` are not distinct rows of the global batch.
    """
    check_rows(rows, config.global_batch_size)
    examples = corpus.named_validation[name] if name else corpus.validation
    size = config.global_batch_size

    def read(elements: Sequence[int]) -> Batch:
        is_there = np.array([element < len(examples) for element in elements])
        # If this process has only padding rows, row 0 provides the shapes of the zeros.
        present = [element for element in elements if element < len(examples)] or [0]
        return _spread(examples.evaluation_batch(present), is_there)

    all_batches = -(-len(examples) // size)
    num_batches = all_batches if num_batches is None else min(num_batches, all_batches)
    sizes = BatchSizes.of(size)
    return _iterate(read, config, sizes, rows, num_batches, examples.row_bytes)


def epoch_elements(corpus: Corpus, config: DataConfig, images: ImageConfig) -> Fraction:
    """Return the number of elements after which every example of the train split was read once.

    The examples of a mixture count together: after this many elements, small sources were read more
    often than large ones.

    Args:
        images: config section `images`; repeated images count once.
    """
    # As in `Images`, which draws the images of a batch once for all of their repeats.
    repeats = images.repeats if config.reads_images else 1
    size = config.global_batch_size
    return Fraction(len(corpus.train) * size, -(-size // repeats))


def batches_ahead(batch_bytes: int) -> int:
    """Return how many batches of `batch_bytes` bytes are read ahead of the step."""
    return max(1, min(_PREFETCHED_BATCHES, _PREFETCHED_BYTES // max(batch_bytes, 1)))


def check_rows(rows: Sequence[int], global_batch_size: int) -> None:
    """Check that all rows are distinct rows of the global batch.

    Raises:
        ValueError: There are no rows, a row is repeated, or a row is out of range.
    """
    if (
        len(rows) == 0
        or len(set(rows)) != len(rows)
        or not 0 <= min(rows) <= max(rows) < global_batch_size
    ):
        raise ValueError(
            f"rows={list(rows)} must be one or more distinct numbers from 0 to "
            f"data.global_batch_size - 1 = {global_batch_size - 1}; pass the rows of this process"
        )


def _spread(batch: Batch, is_there: np.ndarray) -> Batch:
    """Scatter the rows of a batch to the places where `is_there` is true, with zeros elsewhere."""
    if is_there.all():
        return batch
    spread = {}
    for name, values in batch.items():
        spread[name] = np.zeros((len(is_there), *values.shape[1:]), values.dtype)
        spread[name][is_there] = values[: is_there.sum()]
    return spread


def _order(examples: Examples, config: DataConfig, seed: int) -> Callable[[int], int]:
    """Return a function that maps an element of the endless stream to the number of a row."""
    if isinstance(examples, ConcatExamples):
        orders = [_shuffled(len(part), seed) for part in examples.parts]
        return mixed_order(config, orders, examples.offsets)
    return _shuffled(len(examples), seed)


def _shuffled(length: int, seed: int) -> Callable[[int], int]:
    """Return a function that maps 0, 1, … to the numbers below `length`, reshuffled each epoch."""
    # Grain adds the epoch to the seed. Without the hash, the first epoch with seed 1 would have the
    # order of the second epoch with seed 0.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(length).shuffle(seed=hashed).repeat()
    return cast(Callable[[int], int], order.__getitem__)


def _iterate(
    read: Callable[[Sequence[int]], Batch],
    config: DataConfig,
    sizes: BatchSizes,
    rows: Sequence[int],
    num_batches: int,
    row_bytes: int,
) -> grain.DatasetIterator[Batch]:
    """Return an iterator over this process's rows of batches; its state is a step count.

    Args:
        read: returns the rows of the given elements.
        sizes: global batch sizes, the last of which `rows` refers to.
    """
    num_ahead = batches_ahead(len(rows) * row_bytes)
    batches = _Batches(read, sizes, rows, num_batches)
    options = grain.ReadOptions(
        num_threads=min(config.num_threads, num_ahead), prefetch_buffer_size=num_ahead
    )
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


class _Batches(Sequence[Batch]):
    """A random-access sequence whose item k holds this process's rows of batch k."""

    def __init__(
        self,
        read: Callable[[Sequence[int]], Batch],
        sizes: BatchSizes,
        rows: Sequence[int],
        num_batches: int,
    ):
        self._read = read
        self._rows = tuple(int(row) for row in rows)
        self._sizes = sizes
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        first = self._sizes.first_element(index)
        size = self._sizes.of_step(index)
        rows = rows_of_size(self._rows, self._sizes.full.size, size)
        elements = [first + row for row in rows]
        batch = self._read(elements)
        batch["index"] = np.array([element % 2**32 for element in elements], np.uint32)
        return batch
