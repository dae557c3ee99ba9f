"""The training state: everything that a step changes."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from sharding.memory import HOST_KIND
from train.optim.ema import find_average
from train.precision import LossScale

Tree = Any

#: Fields that were added to the code later, or depend on the config. A checkpoint may lack them, or
#: have them although the run does not need them.
MAY_LACK = ("num_nonfinite_in_a_row", "spikes", "loss_scale", "amax_history")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spikes:
    """Statistics of earlier gradient norms, to detect spikes; initially all zeros."""

    norm_mean: Any  # float32[] or wider, exponential moving average, biased towards 0
    num_norms: Any  # int32[], number of accepted steps in the average
    num_in_a_row: Any  # int32[], spikes since the last accepted step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes. A checkpoint has this and the position in the data."""

    step: Any  # int32[], steps taken, including skipped ones
    num_skipped: Any  # int32[], steps skipped because they were nonfinite or spikes
    num_nonfinite_in_a_row: Any  # int32[], nonfinite steps since the last accepted step
    params: Tree  # master weights
    opt_state: Tree  # without frozen parameters
    spikes: Spikes | None  # None without train.skip_spikes
    loss_scale: LossScale | None  # None unless precision.compute is float16
    # stack -> float32[layers, n, 2, NUM_BINS], see amax_history.py; None without delayed scaling
    amax_history: dict[str, Any] | None


def merge(tree: Tree, other: Tree) -> Tree:
    """Return `tree` with its None leaves replaced by the leaves of `other`."""

    def is_none(x):
        return x is None

    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=is_none)


def average_of(state: TrainState) -> Tree:
    """Return the average of the parameters, or the parameters if the run keeps no average.

    The average has the shapes and shardings of the parameters and is float32 or wider, so a model
    runs with either. The average of a frozen parameter is the parameter itself.

    Args:
        state: state in the form that the step takes; arrays or ShapeDtypeStructs.
    """
    average = find_average(state.opt_state)
    return state.params if average is None else merge(average, state.params)


def is_for_host(target: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array belongs in host memory."""
    return target.sharding.memory_kind == HOST_KIND


def zeros_of(target: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros for a target's shape and sharding; each process makes only its own shards."""
    zeros = np.broadcast_to(np.zeros((), target.dtype), target.shape)
    return jax.make_array_from_callback(target.shape, target.sharding, zeros.__getitem__)


def copy_of(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a copy with the target's dtype and memory kind; each process copies its own shards.

    Args:
        array: array that is sharded like the target.
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
    """Return the sharding of every leaf of a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
