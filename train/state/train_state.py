"""The training state: all that a step changes."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from sharding.memory import HOST_KIND
from train.precision import LossScale

Tree = Any

#: Fields that came to be later: a checkpoint may lack them, or have them where none are wanted.
MAY_LACK = ("num_nonfinite_in_a_row", "spikes", "loss_scale")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spikes:
    """What a step knows of the gradient norms before it; zeros know of none."""

    norm_mean: Any  # float32[] or wider, exponential mean, still biased towards 0
    num_norms: Any  # int32[], the accepted steps whose norms are in it
    num_in_a_row: Any  # int32[], spikes since the last accepted step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and all that a checkpoint holds beside the data's position."""

    step: Any  # int32[], steps taken, skipped ones included
    num_skipped: Any  # int32[], steps that were not finite, and spikes
    num_nonfinite_in_a_row: Any  # int32[], of those not finite, since the last accepted step
    params: Tree  # master weights
    opt_state: Tree
    spikes: Spikes | None  # None where spikes are not looked for
    loss_scale: LossScale | None  # None where the loss is not scaled


def merged(tree: Tree, other: Tree) -> Tree:
    """Returns `tree` with what it lacks (None) from `other`."""
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=is_none)


def is_for_host(target: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an array is to lie in host memory."""
    return target.sharding.memory_kind == HOST_KIND


def zeros_of(target: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros where an array is to lie; no process makes more than its shards."""
    zeros = np.broadcast_to(np.zeros((), target.dtype), target.shape)
    return jax.make_array_from_callback(target.shape, target.sharding, zeros.__getitem__)


def copy_of(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a copy with the target's dtype and memory; each process copies its own shards.

    Args:
      array: split over devices as the target is.
    """
    kind = target.sharding.memory_kind
    shards = [
        jax.device_put(
            np.array(shard.data, target.dtype), SingleDeviceSharding(shard.device, memory_kind=kind)
        )
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)


def shardings_of(abstract: Tree) -> Tree:
    """Returns the sharding of every leaf of a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def partition_specs_of(abstract: Tree) -> Tree:
    """Returns the PartitionSpec of every leaf of a tree of ShapeDtypeStructs with shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, abstract)
