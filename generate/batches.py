"""Batches of texts of similar length, and the few shapes that they have."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sharding.mesh import num_replicas

#: Texts are padded to a multiple of this, so that few programs are compiled.
_MULTIPLE = 32


def check_batch_size(mesh: Any, batch_size: int) -> int:
    """Return the number of replicas of a mesh.

    Raises:
        ValueError: the batch size is not a positive multiple of the number of replicas.
    """
    replicas = num_replicas(mesh)
    if batch_size < 1 or batch_size % replicas:
        raise ValueError(
            f"batch_size={batch_size} must be a positive multiple of the mesh's {replicas} replicas"
        )
    return replicas


def batches_of(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each batch; rows of similar length are together."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def pad_rows(
    rows: Sequence[Sequence[int]], num_replicas: int, batch_size: int, most: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a batch, int32[B, T], and the lengths of its rows, int32[B].

    There are few batch sizes and lengths. Rows that only fill up the batch have one token.

    Args:
        rows: tokens of at most `batch_size` rows.
        num_replicas: B is a multiple of this.
        batch_size: largest B.
        most: largest T; None: any.
    """
    size = 1 << (len(rows) - 1).bit_length()
    size = -(-size // num_replicas) * num_replicas
    size = min(size, batch_size)
    length = max(map(len, rows))
    length = -(-length // _MULTIPLE) * _MULTIPLE
    length = min(length, most or length)
    tokens_BT = np.zeros((size, length), np.int32)
    lengths_B = np.ones(size, np.int32)
    for place, row in enumerate(rows):
        tokens_BT[place, : len(row)] = row
        lengths_B[place] = len(row)
    return tokens_BT, lengths_B
