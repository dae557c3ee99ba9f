"""A small training state, its shardings on a mesh, and checkpoints of it, for the tests here."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoint.config import CheckpointConfig

KEEP = CheckpointConfig(every_steps=1, max_to_keep=3)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state"], meta_fields=[]
)
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: Any


def make_mesh(pipeline: int, data: int, model: int) -> jax.sharding.Mesh:
    sizes = (pipeline, data, model)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(
        sizes, ("pipeline", "data", "model"), axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def shardings(mesh: jax.sharding.Mesh, tree):
    """Shard blocks over pipeline and model, the embedding over data and model; replicate others."""

    def one(x):
        spec = {3: P("pipeline", None, "model"), 2: P("data", "model")}.get(x.ndim, P())
        return NamedSharding(mesh, spec)

    return jax.tree.map(one, tree)


def make_state(seed: int, mesh: jax.sharding.Mesh | None = None) -> State:
    rng = np.random.default_rng(seed)
    params = {
        "embed": {"table": jnp.asarray(rng.normal(size=(32, 8)), jnp.float32)},
        "blocks": {"kernel": jnp.asarray(rng.normal(size=(4, 8, 16)), jnp.bfloat16)},
        "norm": {"scale": jnp.asarray(rng.normal(size=8), jnp.float32)},
    }
    state = State(jnp.int32(seed), params, optax.adamw(1e-3).init(params))
    return jax.device_put(state, shardings(mesh or make_mesh(1, 1, 1), state))


def abstract(state: State, mesh: jax.sharding.Mesh | None = None) -> State:
    wanted = shardings(mesh or make_mesh(1, 1, 1), state)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, wanted
    )


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
