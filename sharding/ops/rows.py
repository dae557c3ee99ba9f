"""Rows of a table that is split over the mesh, such as the embeddings of tokens."""

import jax
from jax.sharding import PartitionSpec

from sharding.logical import automatic_axes


def rows_of(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Return `table_VD[ids]`, `[*ids, D]`.

    If activations are split over the axes of `act_embed`, each device looks up its part of D: XLA's
    partitioner fails for a table that is split along both dims.

    Args:
        table_VD: table of any floating dtype.
        ids: int32 of any shape, numbers of rows.
    """
    axes = automatic_axes("act_embed")
    if not axes:
        return table_VD[ids]
    return jax.shard_map(
        lambda table_VD, ids: table_VD[ids],
        in_specs=(PartitionSpec(None, axes), PartitionSpec()),
        out_specs=PartitionSpec(*[None] * ids.ndim, axes),
        axis_names={*axes},
        check_vma=False,
    )(table_VD, ids)
