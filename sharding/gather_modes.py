"""When the devices gather each parameter and reduce its gradients: once per step or by layer.

Parameters that `fsdp`, `row` or ZeRO split are all-gathered before a device computes with them:

    GatherMode   forward and backward            gradients
    ONCE         all-gather once per step        summed once, after the last microbatch
    BY_LAYER     all-gather layer by layer       reduce-scatter layer by layer
    STREAMED     host -> device and all-gather   reduce-scatter layer by layer, device -> host
                 layer by layer

train/state/state_layout.py chooses the mode of every parameter once, with the rest of its layout.
pipeline/runtime/gather.py carries it out.
"""

import enum
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding.logical import Rules
from sharding.memory import MemoryConfig, largest
from sharding.mesh import REPLICA_AXES, SHARD_AXES, AnyMesh
from sharding.spec import axes_by_dim, axes_of, is_spec

Tree = Any


class GatherMode(enum.Enum):
    """When a parameter is gathered on the device."""

    ONCE = "once"  # once per step
    BY_LAYER = "by_layer"  # one layer at a time; only for parameters of stacks
    # One layer at a time, from host memory; its gradients are stored there too.
    STREAMED = "streamed"


def all_once(specs: Tree) -> Tree:
    """Return the mode ONCE for every parameter.

    Args:
        specs: PartitionSpec of every parameter.
    """
    return jax.tree.map(lambda _: GatherMode.ONCE, specs, is_leaf=is_spec)


def kept_axes(logical_axes: Tree, rules: Rules) -> Tree:
    """Return the frozenset of mesh axes over which each parameter is never gathered.

    Experts stay divided: the tokens that a device's experts are chosen for are sent to it.

    Args:
        logical_axes: tuple of logical axis names per parameter.
        rules: logical axis -> mesh axes.
    """

    def kept(names: tuple[str | None, ...]) -> frozenset[str]:
        return frozenset(rules["experts"] if "experts" in names else ())

    return jax.tree.map(kept, logical_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def stack_gather_modes(params: Tree, specs: Tree, mesh: AnyMesh, config: MemoryConfig) -> Tree:
    """Choose the modes of a stack's parameters.

    With ZeRO stage 3, the largest parameters are gathered one layer at a time, until
    `shard_parameters_fraction` of all bytes is reached. Without it, the same holds for parameters
    that `fsdp` or `row` splits. The largest are read from host memory until
    `offload_parameters_fraction` is reached, but only parameters that all replica axes split: the
    gradients of the others are summed for all layers at once, on the device.

    Args:
        params: arrays or ShapeDtypeStructs of the stack, of all devices together.
        specs: the same tree of PartitionSpecs.
        config: sets the ZeRO stage and the fractions.

    Returns:
        The same tree of GatherModes.
    """
    leaves, structure = jax.tree.flatten(params)
    replicas = {axis for axis in REPLICA_AXES if mesh.shape[axis] > 1}
    by_layer = largest(leaves, config.shard_parameters_fraction)
    from_host = largest(leaves, config.offload_parameters_fraction)
    modes = []
    for i, spec in enumerate(jax.tree.leaves(specs, is_leaf=is_spec)):
        axes = axes_of(spec)
        is_sharded = config.zero_stage == 3 or bool(axes & replicas & {*SHARD_AXES})
        if from_host[i] and replicas <= axes:
            _check_streamed(spec, mesh, config.offload_parameters_fraction)
            modes.append(GatherMode.STREAMED)
        else:
            modes.append(GatherMode.BY_LAYER if by_layer[i] and is_sharded else GatherMode.ONCE)
    return jax.tree.unflatten(structure, modes)


def _check_streamed(spec: PartitionSpec, mesh: AnyMesh, fraction: float) -> None:
    """Reject a parameter whose parts would have to be exchanged layer by layer, in host memory.

    Raises:
        ValueError: a dim is split over axes that are gathered, and over automatic ones.
    """
    for part in axes_by_dim(spec):
        split = [axis for axis in part if mesh.shape[axis] > 1]
        is_replica = [axis in REPLICA_AXES for axis in split]
        if any(is_replica) and not all(is_replica):
            raise ValueError(
                f"memory.offload_parameters_fraction={fraction} reads parameters from the host one "
                f"layer at a time, but {' and '.join(split)} split the same dimension of one (as "
                "with tensor.mode='3d'); set memory.offload_parameters_fraction=0"
            )
