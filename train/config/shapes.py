"""Shapes of a run's batches and parameters, which are known before any data is read."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data.shapes import example_shapes
from sharding.mesh import AnyMesh, num_replicas
from train.config.schema import RunConfig


def batch_shapes(config: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch.

    Args:
        size: number of examples, the leading dimension of every array.
    """
    shapes = example_shapes(config.data, config.images)
    batch = {name: jax.ShapeDtypeStruct((size, *s), dtype) for name, (s, dtype) in shapes.items()}
    return batch | {"index": jax.ShapeDtypeStruct((size,), jnp.uint32)}  # see data/batches.py


def microbatch_shapes(config: RunConfig, mesh: AnyMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of one replica's microbatch.

    It has `global_batch_size / (num_microbatches × data × fsdp × expert)` examples.

    Args:
        mesh: its axes `data`, `fsdp` and `expert` divide the batch among replicas.
    """
    num_parts = config.train.num_microbatches * num_replicas(mesh)
    return batch_shapes(config, config.data.global_batch_size // num_parts)


def param_shapes(config: RunConfig, model: nnx.Module) -> Any:
    """Return the shapes of a model's parameters, unsharded and with the compute dtype.

    Args:
        model: model; it may be abstract.
    """
    dtype = jnp.dtype(config.precision.compute_dtype)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
        nnx.to_pure_dict(nnx.split(model)[1]),
    )
