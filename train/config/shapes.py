"""What a run's steps take, as shapes alone: they are known before any data is read."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data.shapes import batch_shapes
from sharding.mesh import AnyMesh
from train.config.schema import RunConfig


def batch_of(config: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch of `size` examples as the data makes them."""
    shapes = batch_shapes(config.data, config.images)
    return {name: jax.ShapeDtypeStruct((size, *s), dtype) for name, (s, dtype) in shapes.items()}


def microbatch(
    config: RunConfig, mesh: AnyMesh, model: nnx.Module
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """Returns parameters and a microbatch as the devices of one replica get them."""
    num_parts = config.train.num_microbatches * mesh.shape["data"] * mesh.shape["fsdp"]
    batch = batch_of(config, config.data.global_batch_size // num_parts)
    dtype = jnp.dtype(config.precision.compute)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
        nnx.to_pure_dict(nnx.split(model)[1]),
    )
    return params, batch
