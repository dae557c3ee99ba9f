"""ZeRO: which parts of the training state are sharded over `data`, `context`, `expert` and `depth`.

Apart from dimensions that the rules split (over `fsdp`, for example), all devices along `data`,
`context`, `depth` and, except for experts, `expert` would hold the same state: to the optimizer
they are replicas. With

    stage 1  each replica keeps one part of the master weights and of the optimizer state
    stage 2  gradients are also reduce-scattered once per step: a replica gets only its part
    stage 3  stacks are also gathered one layer at a time, in the forward and again in the
             backward, and their gradients are reduce-scattered layer by layer, so that no device
             holds all of them

Below stage 3, parameters are all-gathered once per step, in the compute dtype.

train/state/state_layout.py calls `split_over_replicas` to shard the state (stages 1 to 3), and
chooses which parameters are gathered by layer (stage 3, gather_modes.py).
pipeline/runtime/gather.py reduce-scatters the gradients instead of summing them (stages 2 and 3).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), section 5.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding.mesh import SHARD_AXES, AnyMesh
from sharding.spec import axes_by_dim, axes_of, is_spec, spec_of

Tree = Any


#: Mesh axes over which only ZeRO splits parameters.
ZERO_AXES = ("data", "context", "expert", "depth")


def split_over_replicas(specs: Tree, params: Tree, layers: Tree, mesh: AnyMesh) -> Tree:
    """Add ZERO_AXES to the spec of all parameters that they divide evenly.

    The dim to split is the one that the rules split over `fsdp` or `row`, even if these have one
    device, or else the largest dim that is not split; for stacks, never the first dim, which counts
    layers. A parameter without such a dim stays replicated: biases of dims that are split over
    `model`, and norms of odd sizes. Afterwards `split_first_dims` (rules.py) moves the axes to the
    first dim where that is possible.

    Args:
        specs: PartitionSpec of every parameter.
        params: the same tree of arrays or ShapeDtypeStructs.
        layers: the same tree of bools: whether the first dim counts a stack's layers.
        mesh: mesh. A parameter that the axes together do not divide is split over one of them.

    Returns:
        The new tree of PartitionSpecs.
    """
    zero_axes = tuple(axis for axis in ZERO_AXES if mesh.shape[axis] > 1)
    if not zero_axes:
        return specs

    def split(spec: PartitionSpec, leaf: Any, is_layers: bool) -> PartitionSpec:
        parts = list(axes_by_dim(spec, len(leaf.shape)))
        # Experts are divided over `expert` already.
        axes = tuple(axis for axis in zero_axes if axis not in axes_of(spec))
        if not axes:
            return spec
        sizes = {
            dim: leaf.shape[dim] // math.prod(mesh.shape[axis] for axis in parts[dim])
            for dim in range(is_layers, len(parts))
        }
        # A dim that XLA splits automatically (over `model`) is not split manually as well, unless
        # the rules do.
        manual = [tuple(axis for axis in part if axis in SHARD_AXES) for part in parts]

        def is_free(dim: int) -> bool:
            split = [axis for axis in parts[dim] if mesh.shape[axis] > 1]
            return not split or any(axis in manual[dim] for axis in split)

        free = [dim for dim in sizes if is_free(dim)]
        for added in (axes, *((axis,) for axis in axes)):
            count = math.prod(mesh.shape[axis] for axis in added)
            fitting = [dim for dim in free if sizes[dim] % count == 0]
            if fitting:
                dim = max(fitting, key=lambda dim: (bool(manual[dim]), sizes[dim], -dim))
                automatic = (axis for axis in parts[dim] if axis not in manual[dim])
                parts[dim] = (*manual[dim], *added, *automatic)
                return spec_of(parts)
        return spec

    return jax.tree.map(split, specs, params, layers, is_leaf=is_spec)


def spec_of_state(
    shape: tuple[int, ...], param_shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh
) -> PartitionSpec:
    """Return the spec of optimizer state that belongs to a parameter, and may have another shape.

    Leading dims of the same size as the parameter's are split in the same way. All other axes of
    the parameter split the first dim that they divide: the slots of a stack, so that a device has
    the state of whole layers, or else a dim of the state's own. If together they divide no dim, the
    last of them are left out.

    Args:
        shape: shape of the state, with the slots of a stack.
        param_shape: shape of the parameter, with the slots of a stack.
        spec: how the parameter is split.
    """
    if shape == param_shape:
        return spec
    parts = axes_by_dim(spec, len(param_shape))
    pairs = enumerate(zip(shape, param_shape, strict=False))
    num_kept = next((i for i, (n, m) in pairs if n != m), min(len(shape), len(param_shape)))
    if not num_kept:
        return PartitionSpec()
    axes = [*parts[:num_kept], *[()] * (len(shape) - num_kept)]
    num_parts = [math.prod(mesh.shape[axis] for axis in part) for part in axes]
    others = tuple(axis for part in parts[num_kept:] for axis in part if mesh.shape[axis] > 1)
    new_dims = range(num_kept, len(shape))
    for end in range(len(others), 0, -1):
        count = math.prod(mesh.shape[axis] for axis in others[:end])
        for dim in (0, *new_dims) if end == len(others) else new_dims:
            if shape[dim] % (num_parts[dim] * count) == 0:
                axes[dim] = (*axes[dim], *others[:end])
                return spec_of(axes)
    return spec_of(axes)
