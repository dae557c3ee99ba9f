"""Merge the adapters of a model into its kernels, while these are read."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from checkpoint.lazy import Index, LazyArray
from convert.model_on_disk import Shapes, Source
from models.adapters import adapter_of
from models.layers.lora import LoraConfig


def without_adapters(source: Source) -> Source:
    """Return the same model without adapters: they are merged into its kernels."""
    if source.lora.rank is None:
        return source
    all_shapes = source.shapes()

    def open_arrays(shapes: Shapes) -> Mapping[str, LazyArray]:
        parts = {name: adapter_parts(name, all_shapes) for name in shapes}
        of_adapters = {part: all_shapes[part] for names in parts.values() for part in names}
        arrays = source.open({**shapes, **of_adapters})
        return {
            name: _MergedArray(arrays[name], [arrays[part] for part in names], source.lora)
            if names
            else arrays[name]
            for name, names in parts.items()
        }

    return dataclasses.replace(source, open=open_arrays, lora=LoraConfig())


def adapter_parts(weight: str, names: Mapping[str, object]) -> list[str]:
    """Return the names of a weight's adapter: A, B, and m with DoRA; empty if it has none."""
    adapter = adapter_of(weight)
    parts = [f"{adapter}.{part}" for part in ("a", "b", "magnitude")]
    return [part for part in parts if part in names]


class _MergedArray(LazyArray):
    """A kernel with its adapter, `[*batch, *inputs, *outputs]`; batch dims: layers, and experts.

    Args:
        parts: A, B, and m with DoRA; see models/layers/lora.py.
    """

    def __init__(self, kernel: LazyArray, parts: list[LazyArray], config: LoraConfig):
        self._kernel = kernel
        self._a, self._b, *magnitude = parts
        self._magnitude = magnitude[0] if magnitude else None
        self._scale = config.scale
        self.shape = kernel.shape
        self.dtype = kernel.dtype
        # A is [*batch, *inputs, r], and B is [*batch, r, *outputs].
        self._num_batch = len(self._a.shape) + len(self._b.shape) - len(self.shape) - 2
        self._sizes = kernel.shape[self._num_batch :]
        self._num_inputs = len(self._a.shape) - 1 - self._num_batch
        self._wide = np.dtype(jnp.promote_types(kernel.dtype, np.float32))
        self._factors: dict[tuple[int, ...], np.ndarray] = {}  # for the layer read last

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of the smallest part that is read at once."""
        return self._kernel.chunk_shape

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the merged kernel."""
        values = np.empty([part.stop - part.start for part in index], self.dtype)
        batch = index[: self._num_batch]
        for place in np.ndindex(*values.shape[: self._num_batch]):
            numbers = tuple(part.start + i for part, i in zip(batch, place, strict=True))
            values[place] = self._read(numbers, index[self._num_batch :])
        return values

    def _read(self, place: tuple[int, ...], index: Index) -> np.ndarray:
        values = self._sum(place, index)
        if self._magnitude is not None:
            values *= self._factor(place)[index[self._num_inputs :]]
        return values.astype(self.dtype)

    def _sum(self, place: tuple[int, ...], index: Index) -> np.ndarray:
        """Return a part of W + scale · A·B of one layer or expert, in float32 or wider."""
        rank = slice(0, self._a.shape[-1])
        a = self._wide_part(self._a, place, (*index[: self._num_inputs], rank))
        b = self._wide_part(self._b, place, (rank, *index[self._num_inputs :]))
        return self._wide_part(self._kernel, place, index) + self._scale * np.tensordot(a, b, 1)

    def _wide_part(self, array: LazyArray, place: tuple[int, ...], index: Index) -> np.ndarray:
        first = tuple(slice(number, number + 1) for number in place)
        part = array.read((*first, *index))
        return part.reshape(part.shape[len(place) :]).astype(self._wide)

    def _factor(self, place: tuple[int, ...]) -> np.ndarray:
        """Return m / ‖W + scale · A·B‖ of one layer, `[*outputs]`."""
        assert self._magnitude is not None
        if place not in self._factors:
            whole = tuple(slice(0, size) for size in self._sizes)
            squares = np.square(self._sum(place, whole))
            norm = np.sqrt(np.sum(squares, axis=tuple(range(self._num_inputs))))
            magnitude = self._wide_part(self._magnitude, place, whole[self._num_inputs :])
            self._factors = {place: magnitude / norm}
        return self._factors[place]
