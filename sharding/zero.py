"""ZeRO: what of the training state the replicas share out among themselves, and how far.

Beside what the rules split (over `fsdp`, say), replicas along `data` hold all things alike. With

    stage 1  each of them keeps a part of the master weights and of the optimizer's state
    stage 2  and gets its part alone of the sums of gradients, in a reduce-scatter once a step
    stage 3  and stacks are whole one layer at a time, in the forward and again in the backward;
             their gradients are scattered layer by layer, so that no device holds all of them

Below stage 3 parameters are put together once a step, in the dtype of the computation.
Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), section 5.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding.memory import MemoryConfig, largest
from sharding.mesh import AnyMesh
from sharding.rules import axes_of

Tree = Any


def split_over_data(specs: Tree, params: Tree, layers: Tree, mesh: AnyMesh) -> Tree:
    """Returns the specs with `data` added to one dim of each parameter that can be cut so.

    That is the dim that is split over `fsdp` already, or else the largest that is not split; of a
    stack's arrays not the first, of its layers. What has none that can be cut evenly stays whole:
    biases of what is split over `model`, and norms of odd sizes.

    Args:
      specs: the PartitionSpec of every parameter.
      params: the same tree of arrays or ShapeDtypeStructs.
      layers: the same tree of bools: whether the first dim is that of a stack's layers.
    """
    count = mesh.shape["data"]

    def split(spec: PartitionSpec, leaf: Any, is_layers: bool) -> PartitionSpec:
        parts = [part if isinstance(part, tuple) else (part,) if part else () for part in spec]
        parts += [()] * (len(leaf.shape) - len(parts))
        if "data" in axes_of(spec):
            return spec
        sizes = {
            dim: leaf.shape[dim] // math.prod(mesh.shape[axis] for axis in parts[dim])
            for dim in range(is_layers, len(parts))
        }
        # A dim that XLA splits by itself, over `model`, cannot be cut by hand in place.
        free = [d for d in sizes if all(a == "fsdp" or mesh.shape[a] == 1 for a in parts[d])]
        fitting = [dim for dim in free if sizes[dim] % count == 0]
        if count == 1 or not fitting:
            return spec
        dim = max(fitting, key=lambda dim: ("fsdp" in parts[dim], sizes[dim], -dim))
        parts[dim] = (*parts[dim], "data")
        return PartitionSpec(*(part or None for part in parts))

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(split, specs, params, layers, is_leaf=is_spec)


def one_layer_at_a_time(params: Tree, config: MemoryConfig) -> Tree:
    """Returns a bool per parameter of a stack: whether it is whole for one layer at a time.

    Args:
      params: arrays or ShapeDtypeStructs of a stack. The largest come first, until
        `shard_parameters_fraction` of all bytes is reached.
    """
    leaves, structure = jax.tree.flatten(params)
    fraction = config.shard_parameters_fraction if config.zero_stage == 3 else 0.0
    return jax.tree.unflatten(structure, largest(leaves, fraction))
