"""Maps rows of the global batch to processes, and places them on the mesh."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sharding.mesh import AnyMesh
from sharding.ops.sequence import WHOLE, SequenceSplit


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the arrays of a batch are split over a mesh: by examples, and some also by tokens.

    Attributes:
        sequence: how sequences are divided over `context`.
    """

    mesh: AnyMesh
    sequence: SequenceSplit = WHOLE

    def sharding(self, name: str) -> NamedSharding:
        """Return the sharding of the array of this name."""
        return NamedSharding(self.mesh, self.sequence.batch_spec(name))

    def in_order(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return an array `[rows, ...]` with its tokens in the order of the devices."""
        if name not in self.sequence.arrays or self.sequence.num_chunks == 1:
            return array
        return array[:, self.sequence.order(array.shape[1])]


def process_rows(sharding: NamedSharding, global_batch_size: int) -> list[int]:
    """Return the rows of the global batch that this process's devices hold, in order.

    Processes whose devices differ only along other axes (pipeline, context, model) hold the
    same rows.

    Args:
        sharding: of an array that is split by examples only.
        global_batch_size: number of rows on all processes.
    """
    rows_of_device: Any = sharding.addressable_devices_indices_map((global_batch_size,))
    return sorted(
        {row for (rows,) in rows_of_device.values() for row in range(global_batch_size)[rows]}
    )


def place_batch(
    batch: dict[str, np.ndarray], rows: list[int], layout: BatchLayout, global_batch_size: int
) -> dict[str, jax.Array]:
    """Assemble the global batch on the mesh from this process's rows.

    Args:
        batch: arrays `[len(rows), ...]`, whose tokens are in the order of the text.
        rows: rows of the global batch in `batch`, as returned by `process_rows`.
        layout: how the arrays are split.
        global_batch_size: number of rows on all processes.

    Returns:
        Global arrays `[global_batch_size, ...]`, whose tokens are in the order of the devices.
    """
    position = {row: i for i, row in enumerate(rows)}

    def place(name: str, local: np.ndarray) -> jax.Array:
        local = layout.in_order(name, local)

        def piece(index: Any) -> np.ndarray:
            wanted = range(global_batch_size)[index[0]]
            start = position[wanted[0]]
            return local[start : start + len(wanted), *index[1:]]

        shape = (global_batch_size, *local.shape[1:])
        return jax.make_array_from_callback(shape, layout.sharding(name), piece)

    return {name: place(name, array) for name, array in batch.items()}
