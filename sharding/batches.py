"""Maps rows of the global batch to processes, and places them on the mesh."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sharding.logical import Rules, to_spec
from sharding.mesh import AnyMesh


def batch_sharding(mesh: AnyMesh, rules: Rules) -> NamedSharding:
    """Return the sharding of a batch: the first dim is split, all others are not."""
    return NamedSharding(mesh, to_spec(("batch",), rules))


def process_rows(sharding: NamedSharding, global_batch_size: int) -> list[int]:
    """Return the rows of the global batch that this process's devices hold, in order.

    Processes whose devices differ only along other axes (pipeline, context, expert, model) hold the
    same rows.
    """
    rows_of_device: Any = sharding.addressable_devices_indices_map((global_batch_size,))
    return sorted(
        {row for (rows,) in rows_of_device.values() for row in range(global_batch_size)[rows]}
    )


def place_batch(
    batch: dict[str, np.ndarray], rows: list[int], sharding: NamedSharding, global_batch_size: int
) -> dict[str, jax.Array]:
    """Assemble the global batch on the mesh from this process's rows.

    Args:
        batch: arrays `[len(rows), ...]`.
        rows: rows of the global batch in `batch`, as returned by `process_rows`.
        sharding: batch's sharding, see `batch_sharding`.
        global_batch_size: number of rows on all processes.

    Returns:
        Global arrays `[global_batch_size, ...]`.
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
