r"""Shards your own tensors on a mesh: a (16, 8) tensor over both axes of a 2×2 mesh.

Run it in one process or in two:

    python -m docs.examples.shard_a_tensor
    python -m launch.local --processes=2 --devices_per_process=2 -- \
        python -m docs.examples.shard_a_tensor

Each device gets a shard of shape (8, 4):

              columns -> model
              +--------+--------+
    rows ->   | (8, 4) | (8, 4) |
    data      +--------+--------+
              | (8, 4) | (8, 4) |
              +--------+--------+
"""

import jax
import jax.numpy as jnp
from flax import nnx

from distributed import startup
from models.layers.basic import param
from models.stack import logical_axes
from sharding.logical import axis_rules, constrain
from sharding.mesh import MeshConfig
from sharding.rules import make_rules, partition_specs, shardings

SHAPE = (16, 8)
AXES = ("rows", "columns")


class AddWeight(nnx.Module):
    """Adds a sharded parameter to a tensor with the same sharding."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.weight = param(jax.nn.initializers.ones, rngs, SHAPE, AXES)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x + weight, float[16, 8]."""
        return constrain(x + self.weight[...], *AXES)


def main() -> jax.Array:
    """Build the parameter and a tensor on the mesh, add them, and print the shapes of the shards.

    Returns:
        The sum, float[16, 8], sharded over both axes of the mesh.
    """
    mesh = startup.start(MeshConfig(data=2, model=2))
    rules = make_rules({"rows": "data", "columns": "model"})  # logical axis -> mesh axis
    # Trace the module without allocating its parameter, to find the sharding to build it with.
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
