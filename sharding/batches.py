"""Host-local rows of a global batch, and their way onto the mesh."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharding.logical import Rules
from sharding.mesh import AnyMesh
from sharding.rules import to_spec


def batch_sharding(mesh: AnyMesh, rules: Rules) -> NamedSharding:
    """Returns how a batch lies on the mesh: its first dim is split, the rest is not."""
    return NamedSharding(mesh, PartitionSpec(*to_spec(("batch",), rules)))


def process_rows(sharding: NamedSharding, global_batch_size: int) -> list[int]:
    """Returns the rows of the global batch that this process's devices hold, in order.

    Processes whose devices differ only along other axes (pipeline, model) hold the same rows.
    """
    held: Any = sharding.addressable_devices_indices_map((global_batch_size,))
    return sorted({row for (rows,) in held.values() for row in range(global_batch_size)[rows]})


def place_batch(
    batch: dict[str, np.ndarray], rows: list[int], sharding: NamedSharding, global_batch_size: int
) -> dict[str, jax.Array]:
    """Returns the global batch on the mesh.

    Args:
      batch: arrays `[len(rows), ...]`, the rows that `process_rows` named.
    """
    position = {row: i for i, row in enumerate(rows)}

    def place(local: np.ndarray) -> jax.Array:
        def piece(index: Any) -> np.ndarray:
            wanted = range(global_batch_size)[index[0]]
            start = position[wanted[0]]
            return local[start : start + len(wanted)]

        shape = (global_batch_size, *local.shape[1:])
        return jax.make_array_from_callback(shape, sharding, piece)

    return {name: place(array) for name, array in batch.items()}
