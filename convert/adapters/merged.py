"""Merge the adapters of a model into its kernels, while these are read."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from checkpoint.lazy import Index, LazyArray
from convert.model_on_disk import Shapes, Source
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


def adapter_parts(kernel: str, names: Mapping[str, object]) -> list[str]:
    """Return the names of a kernel's adapter: A, B, and m with DoRA; empty if it has none."""
    layer, _, word = kernel.rpartition(".")
    parts = [f"{layer}.lora.{part}" for part in ("a", "b", "magnitude")]
    return [part for part in parts if word == "kernel" and part in names]


class _MergedArray(LazyArray):
    """A kernel with its adapter, `[*layers, *inputs, *outputs]`.

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
        # A is [*layers, *inputs, r], and B is [*layers, r, *outputs].
        self._is_stacked = len(self._a.shape) + len(self._b.shape) > len(self.shape) + 2
        self._sizes = kernel.shape[self._is_stacked :]
        self._num_inputs = len(self._a.shape) - 1 - self._is_stacked
        self._wide = np.dtype(jnp.promote_types(kernel.dtype, np.float32))
        self._factors: dict[int | None, np.ndarray] = {}  # for the layer read last

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of the smallest part that is read at once."""
        return self._kernel.chunk_shape

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the merged kernel."""
        if not self._is_stacked:
            return self._read(None, index)
        values = np.empty([part.stop - part.start for part in index], self.dtype)
        for number in range(len(values)):
            values[number] = self._read(index[0].start + number, index[1:])
        return values

    def _read(self, layer: int | None, index: Index) -> np.ndarray:
        values = self._sum(layer, index)
        if self._magnitude is not None:
            values *= self._factor(layer)[index[self._num_inputs :]]
        return values.astype(self.dtype)

    def _sum(self, layer: int | None, index: Index) -> np.ndarray:
        """Return a part of W + scale · A·B of one layer, in float32 or wider."""
        rank = slice(0, self._a.shape[-1])
        a = self._wide_part(self._a, layer, (*index[: self._num_inputs], rank))
        b = self._wide_part(self._b, layer, (rank, *index[self._num_inputs :]))
        return self._wide_part(self._kernel, layer, index) + self._scale * np.tensordot(a, b, 1)

    def _wide_part(self, array: LazyArray, layer: int | None, index: Index) -> np.ndarray:
        if layer is None:
            return array.read(index).astype(self._wide)
        return array.read((slice(layer, layer + 1), *index))[0].astype(self._wide)

    def _factor(self, layer: int | None) -> np.ndarray:
        """Return m / ‖W + scale · A·B‖ of one layer, `[*outputs]`."""
        assert self._magnitude is not None
        if layer not in self._factors:
            whole = tuple(slice(0, size) for size in self._sizes)
            squares = np.square(self._sum(layer, whole))
            norm = np.sqrt(np.sum(squares, axis=tuple(range(self._num_inputs))))
            magnitude = self._wide_part(self._magnitude, layer, whole[self._num_inputs :])
            self._factors = {layer: magnitude / norm}
        return self._factors[layer]
