"""Shapes of a run's batches and parameters, which are known before any data is read."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data.shapes import example_shapes
from sharding.mesh import AnyMesh
from train.config.schema import RunConfig


def batch_of(config: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch.

    Args:
        config: the run's config.
        size: number of examples, the leading dimension of every array.
    """
    shapes = example_shapes(config.data, config.images)
    return {name: jax.ShapeDtypeStruct((size, *s), dtype) for name, (s, dtype) in shapes.items()}


def microbatch(
    config: RunConfig, mesh: AnyMesh, model: nnx.Module
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of a model's parameters and of one replica's microbatch.

    Args:
        config: the run's config.
        mesh: its axes `data` and `fsdp` divide the batch among replicas.
        model: the model; it may be abstract.

    Returns:
        (params, batch): ShapeDtypeStructs. The parameters are unsharded and have the compute dtype.
        The batch has `global_batch_size / (num_microbatches × data × fsdp)` examples.
    """
    num_parts = config.train.num_microbatches * mesh.shape["data"] * mesh.shape["fsdp"]
    batch = batch_of(config, config.data.global_batch_size // num_parts)
    dtype = jnp.dtype(config.precision.compute)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
        nnx.to_pure_dict(nnx.split(model)[1]),
    )
    return params, batch
