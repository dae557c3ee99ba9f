"""Batches of a streamed corpus, in an order that needs neither its length nor all of it.

The corpus is read in blocks of rows, such as the sequences of a few shards. The rows of a block are
shuffled; blocks follow each other. With blocks of 3 rows and a global batch of 4:

    block       0        |  3        |  6
    element     0  1  2  |  3  4  5  |  6  7  8       row r of step k is element k * 4 + r
    row         1  2  0  |  5  3  4  |  8  6  7       number in the order in which rows are read
    step        0  0  0     0  1  1     1  1  2

A position is the next element, and where the block begins that contains it. It is the same in all
processes, because each reads all blocks and takes its rows from them.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from data.batch_sizes import BatchSizes, rows_of_size
from data.examples import (
    BLOCK,
    TRAIN,
    Batch,
    Example,
    Examples,
    ExampleStream,
    StreamPosition,
    generator,
    stack,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A block that has been read.

    Attributes:
        first: number of its first element in the endless stream.
        start: position that it was read from.
        order: numbers of its rows, in the order in which elements use them.
    """

    first: int
    start: StreamPosition
    rows: Examples
    order: np.ndarray

    @property
    def end(self) -> int:
        """The number of the first element after the block."""
        return self.first + len(self.order)


class StreamBatches(grain.DatasetIterator[Batch]):
    """An endless iterator over this process's rows of the batches of a stream.

    Args:
        order: maps a number in the endless order of shards to the number of a shard.
        rows: rows of a full global batch that this process supplies.
        sizes: global batch sizes.
        seed: seed of everything random in a row, and of the order in a block.
    """

    def __init__(
        self,
        stream: ExampleStream,
        order: Callable[[int], int],
        rows: Sequence[int],
        sizes: BatchSizes,
        seed: int,
    ):
        super().__init__()
        self.stream = stream
        self._order = order
        self._rows = tuple(int(row) for row in rows)
        self._sizes = sizes
        self._seed = seed
        self.set_state({"element": 0, "block": 0, "shard": 0, "offset": 0})

    def __next__(self) -> Batch:
        """Return the rows of the next step.

        Raises:
            BrokenExample: A shard cannot be read.
        """
        size = self._sizes.of_element(self._element)
        stop = self._element + size
        while self._next_first < stop:
            self._read_block()
        rows = rows_of_size(self._rows, self._sizes.full.size, size)
        elements = [self._element + row for row in rows]
        batch = stack([self._example(element) for element in elements])
        batch["index"] = np.array([element % 2**32 for element in elements], np.uint32)
        self._element = stop
        self._blocks = [block for block in self._blocks if block.end > stop]
        return batch

    def _read_block(self) -> None:
        rows, end = self.stream.read_block(self._next_start, self._order)
        first = self._next_first
        order = generator((BLOCK, self._seed, first)).permutation(len(rows))
        block = _Block(first=first, start=self._next_start, rows=rows, order=order)
        self._blocks.append(block)
        self._next_first = block.end
        self._next_start = end

    def _example(self, element: int) -> Example:
        block = next(block for block in self._blocks if element < block.end)
        row = int(block.order[element - block.first])
        return block.rows.example(row, (TRAIN, self._seed, element))

    def get_state(self) -> dict[str, Any]:
        """Return the next element, and the start of the block that contains it."""
        first, start = self._next_first, self._next_start
        if self._blocks:
            first, start = self._blocks[0].first, self._blocks[0].start
        return {"element": self._element, "block": first, **dataclasses.asdict(start)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where another iterator has returned this state."""
        self._element: int = state["element"]
        self._blocks: list[_Block] = []
        self._next_first: int = state["block"]
        self._next_start = StreamPosition(shard=state["shard"], offset=state["offset"])


class ReadAhead(grain.experimental.ThreadPrefetchDatasetIterator[Batch]):
    """The batches of a stream, of which a thread reads some ahead of the step."""

    def __init__(self, batches: StreamBatches, num_ahead: int):
        super().__init__(batches, num_ahead)
        self._stream = batches.stream

    def close(self) -> None:
        """Stop reading; the thread may wait for a shard, which `stream.close` ends."""
        if self._closed or sys.is_finalizing():  # the garbage collector calls it too
            return
        self._stream.close()
        super().close()
