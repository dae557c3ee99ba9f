"""Functions of whole matrices that are split over the mesh: each device computes some of them.

A stack's kernel is many matrices, of which a device holds a part each, e.g. with ZeRO over `data`
and tensor parallelism over `model`, both of size 2, and 4 layers of a stage:

    at first     every device: a quarter of each of the matrices 0 1 2 3
    all-to-all   device 0: matrix 0    1: matrix 1    2: matrix 2    3: matrix 3
    function     on whole matrices, without communication
    all-to-all   back

Devices that would hold the same parts also divide the matrices between them, and gather the
results. So no matrix is computed twice. The pipeline stays as it is: a stage computes its layers.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding.spec import axes_by_dim, restrict, without


def on_whole_matrices(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, spec: PartitionSpec, num_batch: int
) -> jax.Array:
    """Return `function(x)` for an array of matrices, which are its last dims.

    Args:
        function: maps `[matrices, ...]` to an array of this shape, each matrix by itself. All-zero
            matrices are added as padding.
        x: `[*batch, ...]`.
        spec: how x is split over the mesh. Axes that are manual already do not count.
        num_batch: number of leading dims that count matrices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {} if mesh.empty else _free_axes(mesh)
    spec = restrict(spec, free)

    def on_device(x: jax.Array) -> jax.Array:
        return _on_device(function, x, axes_by_dim(spec, x.ndim), num_batch, free)

    if not free:
        return on_device(x)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=set(free),
        check_vma=False,
    )(x)


def _free_axes(mesh: jax.sharding.AbstractMesh) -> dict[str, int]:
    """Return the axes that are not manual in an enclosing `shard_map`, with their sizes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {
        axis: size
        for axis, size in mesh.shape.items()
        if types[axis] is not jax.sharding.AxisType.Manual
    }


def _on_device(
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    axes: tuple[tuple[str, ...], ...],
    num_batch: int,
    sizes: dict[str, int],
) -> jax.Array:
    """Return the part of the result that belongs to this device.

    Args:
        function: as for `on_whole_matrices`.
        x: part of this device.
        axes: mesh axes by dim of x.
        num_batch: as for `on_whole_matrices`.
        sizes: size of every mesh axis that is manual here.
    """
    axes = without(axes, {axis for axis, size in sizes.items() if size == 1})
    splits = [(1 + i, part) for i, part in enumerate(axes[num_batch:]) if part]
    used = {axis for part in axes for axis in part}
    # A stage has layers of its own, so `pipeline` never holds copies that it could divide.
    idle = tuple(a for a, n in sizes.items() if n > 1 and a not in used and a != "pipeline")
    num_parts = math.prod(sizes[axis] for _, part in (*splits, (0, idle)) for axis in part)
    num_matrices = math.prod(x.shape[:num_batch])
    flat = x.reshape(num_matrices, *x.shape[num_batch:])
    padding = -num_matrices % num_parts
    flat = jnp.pad(flat, ((0, padding), *[(0, 0)] * (flat.ndim - 1)))
    if idle:
        count = len(flat) // math.prod(sizes[axis] for axis in idle)
        flat = jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(idle) * count, count)
    for dim, part in splits:
        flat = jax.lax.all_to_all(flat, part, split_axis=0, concat_axis=dim, tiled=True)
    flat = function(flat)
    for dim, part in reversed(splits):
        flat = jax.lax.all_to_all(flat, part, split_axis=dim, concat_axis=0, tiled=True)
    if idle:
        flat = jax.lax.all_gather(flat, idle, axis=0, tiled=True)
    return flat[:num_matrices].reshape(x.shape)
