"""The training state: built abstractly, laid out, then made in place on the mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from models.stack import logical_axes
from sharding.logical import Rules
from sharding.rules import partition_specs, shardings

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and all that a checkpoint holds beside the data's position."""

    step: Any  # int32[], steps taken, skipped ones included
    num_skipped: Any  # int32[], steps whose gradients were not finite
    params: Tree  # master weights
    opt_state: Tree


def abstract_state(
    build: Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    rules: Rules,
    params_dtype: str,
) -> TrainState:
    """Returns the state as ShapeDtypeStructs with shardings on `mesh`; nothing is computed.

    Args:
      build: makes the model, from a fixed seed.

    Raises:
      ValueError: a parameter that the mesh cannot lay out (see sharding/rules.py).
    """
    model = nnx.eval_shape(build)
    state = jax.eval_shape(lambda: _initial_state(build, optimizer, params_dtype))
    specs = partition_specs(state.params, logical_axes(model), rules, mesh)
    all_specs = TrainState(
        step=PartitionSpec(),
        num_skipped=PartitionSpec(),
        params=specs,
        opt_state=optax.tree_utils.tree_map_params(
            optimizer,
            lambda leaf, param, spec: spec if leaf.shape == param.shape else PartitionSpec(),
            state.opt_state,
            state.params,
            specs,
            transform_non_params=lambda _: PartitionSpec(),
        ),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings(mesh, all_specs),
    )


def initialise(
    build: Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    params_dtype: str,
) -> TrainState:
    """Returns the initial state, each shard made on its own device: the same bits on every mesh."""
    out_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(
        lambda: _initial_state(build, optimizer, params_dtype), out_shardings=out_shardings
    )
    return make()


def partition_specs_of(abstract: Tree) -> Tree:
    """Returns the PartitionSpec of every leaf of a tree that `abstract_state` made."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, abstract)


def _initial_state(build, optimizer, params_dtype: str) -> TrainState:
    params = nnx.to_pure_dict(nnx.split(build())[1])
    # Random bits are drawn in float32 whatever the master weights' dtype.
    params = jax.tree.map(lambda x: x.astype(params_dtype), params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        num_skipped=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
    )
