"""Lazy operations on the tensors of other trainers' checkpoints."""

from pathlib import Path

import numpy as np
import pytest

from convert.tensor_files import Tensor
from convert.trainers.weights import derived, joined, keep_latest, rows


def tensor_of(values: np.ndarray, reads: list[str], name: str = "x") -> Tensor:
    """Return a tensor that notes when its values are read."""

    def read() -> np.ndarray:
        reads.append(name)
        return values

    return Tensor(name=name, file=Path("f"), dtype=values.dtype, shape=values.shape, map=read)


def test_operations_read_nothing_until_values_are_needed():
    reads: list[str] = []
    shards = [tensor_of(np.full((2, 3), number, np.float32), reads) for number in range(2)]
    whole = joined(shards, 0)
    part = rows("x", whole, slice(1, 3))
    transposed = derived("x", part, (3, 2), np.transpose)
    assert (whole.shape, part.shape, transposed.shape) == ((4, 3), (2, 3), (3, 2))
    assert reads == []
    np.testing.assert_array_equal(transposed.map(), [[0, 1]] * 3)
    assert len(reads) == 2


def test_shards_must_agree():
    shards = [tensor_of(np.zeros(shape, np.float32), []) for shape in ((2, 3), (2, 4))]
    with pytest.raises(ValueError, match="its shards must agree"):
        joined(shards, 0)
    assert joined(shards, 1).shape == (2, 7)
    other = tensor_of(np.zeros((2, 3), np.float16), [])
    with pytest.raises(ValueError, match="its shards must agree"):
        joined([shards[0], other], 0)


def test_only_the_tensor_that_was_read_last_keeps_its_values():
    reads: list[str] = []
    tensors = {name: tensor_of(np.zeros(3, np.float32), reads, name) for name in "ab"}
    kept = keep_latest(tensors)
    for name in "aabba":
        kept[name].map()
    assert reads == ["a", "b", "a"]
