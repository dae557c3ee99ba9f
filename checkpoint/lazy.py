"""Arrays that are read and written a part at a time, so that none needs to fit into memory."""

import abc
import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

#: Larger arrays are cut into chunks of at most so many bytes: what reading a part of them costs.
CHUNK_BYTES = 32 * 2**20

_CACHE_BYTES = 64 * 2**20

Index = tuple[slice, ...]


class LazyArray(abc.ABC):
    """Something with a shape and a dtype, of which a part can be read.

    Attributes:
      shape: of the whole.
      dtype: of what `read` returns.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """Returns the part that `index`, one slice a dimension with start and stop, names."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class LazyHandler(ocp.type_handlers.NumpyHandler):
    """Makes Orbax write LazyArrays, a few chunks at a time."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None):
        for one in zip(values, infos, args, strict=True):
            await super()._background_serialize(*([item] for item in one))

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: ts.Context):
        store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        pending, num_bytes = [], 0
        for index in blocks(value.shape, _chunk_shape(store)):
            part = value.read(index)
            pending.append(store[index].write(part, can_reference_source_data_indefinitely=True))
            num_bytes += part.nbytes
            if num_bytes >= 2 * CHUNK_BYTES:
                await asyncio.gather(*pending)
                pending, num_bytes = [], 0
        await asyncio.gather(*pending)


def save_args(leaf: Any) -> ocp.SaveArgs:
    """Returns how an array is cut into chunks.

    Of three dimensions or more the first is cut first: it is that of the layers, and one layer can
    then be read without the others.
    """
    if leaf.nbytes <= CHUNK_BYTES:
        return ocp.SaveArgs()
    axes = (0,) if len(leaf.shape) >= 3 else ()
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=axes)


def blocks(shape: Sequence[int], block: Sequence[int]) -> Iterator[Index]:
    """Yields the parts of an array of `shape` that lie on a grid of `block`, in C order."""
    starts = (range(0, size, step) for size, step in zip(shape, block, strict=True))
    for start in itertools.product(*starts):
        limits = zip(start, block, shape, strict=True)
        yield tuple(slice(a, min(a + step, size)) for a, step, size in limits)


class StoredArray(LazyArray):
    """An array of a checkpoint on disk."""

    def __init__(self, store: ts.TensorStore):
        self._store = store
        self.shape, self.dtype = tuple(store.shape), store.dtype.numpy_dtype

    def read(self, index: Index) -> np.ndarray:
        return self._store[index].read().result()

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return _chunk_shape(self._store)


def stored_arrays(directory: str | Path) -> Mapping[str, StoredArray]:
    """Returns the arrays of a checkpoint by name, such as `params.decoder.layers.norm.scale`.

    Args:
      directory: a checkpoint, `<step>/`.
    """
    state = Path(directory).absolute() / "state"
    # Without this Orbax would ask which devices there are.
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, enable_pinned_host_transfer=False)
    tree = handler.metadata(epath.Path(state)).tree
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    names = [".".join(str(_key(key)) for key in path) for path, _ in leaves]
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    return {name: StoredArray(_open(state, name, context)) for name in names}


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape or ())


def _open(state: Path, name: str, context: ts.Context) -> ts.TensorStore:
    kvstore = {"driver": "ocdbt", "base": f"{state.as_uri()}/", "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore}
    return ts.open(spec, open=True, read=True, context=context).result()


def _key(key: Any) -> Any:
    return next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))
