"""Tensors of one's own on a mesh: a (16, 8) tensor split over both dims of a 2×2 mesh.

    python -m docs.examples.shard_a_tensor
    python -m launch.local --processes=2 --devices_per_process=2 -- \\
        python -m docs.examples.shard_a_tensor
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import param
from models.stack import logical_axes
from sharding.distributed import startup
from sharding.logical import axis_rules, constrain
from sharding.mesh import MeshConfig
from sharding.rules import make_rules, partition_specs, shardings

SHAPE, AXES = (16, 8), ("rows", "columns")


class AddWeight(nnx.Module):
    """Adds a parameter that is split over both dims to a tensor that is split likewise."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.weight = param(jax.nn.initializers.ones, rngs, SHAPE, AXES)

    def __call__(self, x: jax.Array) -> jax.Array:
        return constrain(x + self.weight[...], *AXES)


def main() -> jax.Array:
    mesh = startup.start(MeshConfig(data=2, model=2))
    rules = make_rules({"rows": "data", "columns": "model"})  # logical axis -> mesh axis
    graph, state = nnx.split(nnx.eval_shape(lambda: AddWeight(rngs=nnx.Rngs(0))))
    axes = logical_axes(nnx.merge(graph, state))
    layout = shardings(mesh, partition_specs(nnx.to_pure_dict(state), axes, rules, mesh))

    def build():
        return nnx.to_pure_dict(nnx.split(AddWeight(rngs=nnx.Rngs(0)))[1])

    with jax.set_mesh(mesh), axis_rules(rules):
        params = jax.jit(build, out_shardings=layout)()
        x = jax.jit(lambda: jnp.arange(128.0).reshape(SHAPE), out_shardings=layout["weight"])()
        y = jax.jit(lambda params, x: nnx.merge(graph, params)(x))(params, x)
    local = [shard.data.shape for shard in y.addressable_shards]
    print(f"process {jax.process_index()}: global shape {y.shape}, local shapes {local}")
    return y


if __name__ == "__main__":
    main()
