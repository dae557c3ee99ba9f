"""Reads and writes arrays of a checkpoint in parts, so that they need not fit into memory.

`LazyArray` is an array-like object that can return any part of itself. `Checkpoints.save` accepts
it in place of a `jax.Array` and writes it chunk by chunk; `stored_arrays` opens the arrays of a
checkpoint as LazyArrays. The conversion of Hugging Face models is built on these two.
"""

import abc
import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from checkpoint.arrays import open_arrays
from checkpoint.errors import read_patiently
from checkpoint.paths import check_path

#: Larger arrays are stored in chunks of at most this size. Reading any element of a chunk reads
#: the whole chunk.
CHUNK_BYTES = 32 * 2**20

Index = tuple[slice, ...]


class LazyArray(abc.ABC):
    """An array that can be read in parts.

    Attributes:
        shape: shape of the whole array.
        dtype: dtype of the arrays that `read` returns.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """Return a part of the array.

        Args:
            index: one slice with start and stop per dimension.
        """

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of the smallest part that is read at once; by default the whole array."""
        return self.shape

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the whole array in bytes."""
        return self.size * self.dtype.itemsize


class LazyHandler(ocp.type_handlers.NumpyHandler):
    """Writes LazyArrays with Orbax, a few chunks at a time.

    Orbax's own handler writes all arrays of a checkpoint concurrently, each as a whole. This one
    writes one array after another and holds only a few chunks of it in memory.
    """

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None):
        # One array per call, because the base class writes all arrays of a call concurrently.
        for one in zip(values, infos, args, strict=True):
            await super()._background_serialize(*([item] for item in one))

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: ts.Context):
        store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        pending = []
        num_bytes = 0
        for index in blocks(value.shape, _chunk_shape(store)):
            part = value.read(index)
            pending.append(store[index].write(part, can_reference_source_data_indefinitely=True))
            num_bytes += part.nbytes
            # Wait before reading on, so that at most a few chunks are in memory.
            if num_bytes >= 2 * CHUNK_BYTES:
                await asyncio.gather(*pending)
                pending = []
                num_bytes = 0
        await asyncio.gather(*pending)


def save_args(leaf: Any) -> ocp.SaveArgs:
    """Return how Orbax divides an array into chunks.

    Arrays of at most CHUNK_BYTES are one chunk. Larger arrays of three or more dimensions are split
    along their first dimension first. In a stack this is the `layers` dimension, so that one layer
    can be read without the others: with chunks of 256 bytes, `float32[4, 6, 8]` becomes 4 chunks of
    `[1, 6, 8]`.

    Args:
        leaf: array or LazyArray.
    """
    if leaf.nbytes <= CHUNK_BYTES:
        return ocp.SaveArgs()
    axes = (0,) if len(leaf.shape) >= 3 else ()
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=axes)


def blocks(shape: Sequence[int], block: Sequence[int]) -> Iterator[Index]:
    """Yield the indices of the blocks that cover an array in C order, with one slice per dimension.

    `blocks((5,), (2,))` yields `(slice(0, 2),)`, `(slice(2, 4),)` and `(slice(4, 5),)`.

    Args:
        block: shape of a block; blocks at the end of a dimension may be smaller.
    """
    starts = (range(0, size, step) for size, step in zip(shape, block, strict=True))
    for start in itertools.product(*starts):
        limits = zip(start, block, shape, strict=True)
        yield tuple(slice(a, min(a + step, size)) for a, step, size in limits)


class StoredArray(LazyArray):
    """An array in a checkpoint on disk."""

    def __init__(self, store: ts.TensorStore, step: Path):
        self._store = store
        self._step = step
        self.shape = tuple(store.shape)
        self.dtype = store.dtype.numpy_dtype

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the array from disk.

        Raises:
            ValueError: its file is damaged.
            ReadError: its file cannot be read.
        """
        return read_patiently(self._step, lambda: self._store[index].read().result())

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a chunk, the smallest part that is read from disk."""
        return _chunk_shape(self._store)


def stored_arrays(directory: str | Path) -> Mapping[str, StoredArray]:
    """Open the arrays of a checkpoint by name, without reading them.

    Args:
        directory: checkpoint, `<step>/`.

    Raises:
        ValueError: the checkpoint is damaged.
        ReadError: a file cannot be read.
    """
    step = Path(directory)
    check_path(step)
    try:
        return {name: StoredArray(store, step) for name, store in open_arrays(step).items()}
    except ValueError as error:
        raise ValueError(f"checkpoint {directory} is damaged: {error}") from error


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape or ())
