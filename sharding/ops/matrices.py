"""Functions of whole matrices that are split over the mesh: each device computes some of them.

A stack's kernel is many matrices, of which a device holds a part each, e.g. with ZeRO over `data`
and tensor parallelism over `model`, both of size 2, and 4 layers of a stage:

    at first     every device: a quarter of each of the matrices 0 1 2 3
    all-to-all   device 0: matrix 0    1: matrix 1    2: matrix 2    3: matrix 3
    function     on whole matrices, without communication
    all-to-all   back

Devices that would hold the same parts also divide the matrices between them, and gather the
results. So no matrix is computed twice. The pipeline stays as it is: a stage computes its layers.

A function can have several arrays, such as a matrix and statistics of it. The first one decides
which device computes which matrices. Others that are split in the same way, or by whole layers
among the same devices, arrive there with as little communication.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.spec import Axes, axes_by_dim, axes_of, restrict, spec_of

Arrays = tuple[jax.Array, ...]


def on_whole_matrices(
    function: Callable[..., Arrays],
    arrays: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    num_batch: int,
) -> Arrays:
    """Return `function(*arrays)` for arrays of matrices, which are their last dims.

    Args:
        function: maps arrays `[matrices, ...]` to a tuple of arrays `[matrices, ...]`, each matrix
            by itself. All-zero matrices are added as padding.
        arrays: arrays `[*batch, ...]`, all with the same batch dims.
        specs: how each of them is split over the mesh. Axes that are manual already do not count.
        out_specs: how each result is split.
        num_batch: number of leading dims that count matrices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else _free_axes(mesh)
    real = {axis for axis, size in sizes.items() if size > 1}

    def axes_in(spec: PartitionSpec) -> Axes:
        return axes_by_dim(restrict(spec, real), num_batch)

    first = axes_in(specs[0])
    inner = tuple(axis for part in first[num_batch:] for axis in part)
    # A stage has layers of its own, so `pipeline` never holds copies that it could divide.
    idle = tuple(a for a in sizes if a in real - axes_of(first) - {"pipeline"})
    division = _Division(batch=first[:num_batch], inner=inner, idle=idle, sizes=sizes)
    in_axes = [division.fitting(axes_in(spec)) for spec in specs]
    out_axes = [division.fitting(axes_in(spec)) for spec in out_specs]

    def on_device(*arrays: jax.Array) -> Arrays:
        batch = arrays[0].shape[:num_batch]
        whole = [division.whole(x, axes) for x, axes in zip(arrays, in_axes, strict=True)]
        results = zip(function(*whole), out_axes, strict=True)
        return tuple(division.parts(x, axes, batch) for x, axes in results)

    if not sizes:
        return on_device(*arrays)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(map(spec_of, in_axes)),
        out_specs=tuple(map(spec_of, out_axes)),
        axis_names=set(sizes),
        check_vma=False,
    )(*arrays)


def _free_axes(mesh: jax.sharding.AbstractMesh) -> dict[str, int]:
    """Return the axes that are not manual in an enclosing `shard_map`, with their sizes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {
        axis: size
        for axis, size in mesh.shape.items()
        if types[axis] is not jax.sharding.AxisType.Manual
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Division:
    """Which device computes which matrices.

    The matrices of a device, in the order of the batch dims, are cut into as many chunks as there
    are devices along `inner`, and each chunk along `idle`. The first axis is the major one.

    Attributes:
        batch: mesh axes of the batch dims.
        inner: axes that split the dims of the first array's matrices.
        idle: axes along which the first array is replicated.
        sizes: size of every axis that is manual here.
    """

    batch: Axes
    inner: tuple[str, ...]
    idle: tuple[str, ...]
    sizes: dict[str, int]

    def fitting(self, axes: Axes) -> Axes:
        """Return the axes by dim with which an array enters or leaves the function.

        They are `axes` unless the chunks of these would be others; then no matrix is split, and
        the partitioner moves the array.
        """
        num_batch = len(self.batch)
        if self._is_by_chunk(axes):
            return axes
        runs = [part for part in axes[num_batch:] if part]
        starts = [self.inner.index(part[0]) if part[0] in self.inner else None for part in runs]
        are_runs = all(
            start is not None and self.inner[start : start + len(part)] == part
            for start, part in zip(starts, runs, strict=True)
        )
        return axes if axes[:num_batch] == self.batch and are_runs else self.batch

    def whole(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Return this device's matrices, from its part of an array.

        Args:
            x: part `[*batch, ...]`.
            axes: mesh axes by dim of the array, from `fitting`.
        """
        num_batch = len(self.batch)
        flat = x.reshape(math.prod(x.shape[:num_batch]), *x.shape[num_batch:])
        is_by_chunk = self._is_by_chunk(axes)
        num_chunks = 1 if is_by_chunk else self._count(self.inner)
        flat = _padded(flat, 0, num_chunks)
        chunks = _padded(flat.reshape(num_chunks, -1, *flat.shape[1:]), 1, self._count(self.idle))
        if self.idle:
            chunks = self._own(chunks, self.idle, 1)
        flat = chunks.reshape(-1, *chunks.shape[2:])
        for dim, part in () if is_by_chunk else self._steps(axes):
            if dim is None:
                flat = self._own(flat, part, 0)
            else:
                flat = jax.lax.all_to_all(flat, part, split_axis=0, concat_axis=dim, tiled=True)
        return flat

    def parts(self, x: jax.Array, axes: Axes, batch: tuple[int, ...]) -> jax.Array:
        """Return this device's part of an array, from its matrices.

        Args:
            x: matrices of this device, `[matrices, ...]`.
            axes: mesh axes by dim of the array, from `fitting`.
            batch: batch dims of this device's part of the first array.
        """
        is_by_chunk = self._is_by_chunk(axes)
        num_chunks = 1 if is_by_chunk else self._count(self.inner)
        for dim, part in () if is_by_chunk else reversed(self._steps(axes)):
            if dim is None:
                x = jax.lax.all_gather(x, part, axis=0, tiled=True)
            else:
                x = jax.lax.all_to_all(x, part, split_axis=dim, concat_axis=0, tiled=True)
        chunks = x.reshape(num_chunks, -1, *x.shape[1:])
        if self.idle:
            chunks = jax.lax.all_gather(chunks, self.idle, axis=1, tiled=True)
        num_matrices = math.prod(batch)
        per_chunk = -(-num_matrices // self._count(self.inner))
        flat = chunks[:, :per_chunk].reshape(-1, *chunks.shape[2:])
        if is_by_chunk:
            batch = (batch[0] // self._count(self.inner), *batch[1:])
        return flat[: math.prod(batch)].reshape(*batch, *flat.shape[1:])

    def _is_by_chunk(self, axes: Axes) -> bool:
        """Return whether an array is split by its first dim only, as the devices compute it."""
        lead = (*self.batch[0], *self.inner)
        return bool(self.inner) and axes[: len(self.batch)] == (lead, *self.batch[1:])

    def _steps(self, axes: Axes) -> list[tuple[int | None, tuple[str, ...]]]:
        """Return (dim that they split, or None; axes) of all axes of `inner`, major first."""
        dims = {part[0]: (i, part) for i, part in enumerate(axes[len(self.batch) :], 1) if part}
        split = {axis for _, part in dims.values() for axis in part}
        return [
            dims.get(axis, (None, (axis,)))
            for axis in self.inner
            if axis in dims or axis not in split
        ]

    def _own(self, x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        """Return this device's part of a dim that it has whole."""
        count = x.shape[dim] // self._count(axes)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * count, count, dim)

    def _count(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _padded(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    """Return `x` with zeros at the end of a dim, whose size becomes a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, -x.shape[dim] % multiple)
    return jnp.pad(x, padding)
