"""Tests of `checkpoint.lazy`: arrays are written and read in parts, each part once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from checkpoint import lazy
from checkpoint.config import CheckpointConfig
from checkpoint.lazy import LazyArray, blocks, stored_arrays
from checkpoint.manager import Checkpoints

CONFIG = CheckpointConfig(every_steps=1, max_to_keep=3)


class Recorded(LazyArray):
    """An array in memory that counts the reads of each element and records the largest part."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype
        self.reads = np.zeros(values.shape, int)
        self.largest = 0

    def read(self, index):
        self.reads[index] += 1
        self.largest = max(self.largest, self.values[index].nbytes)
        return self.values[index]


def save(directory, state) -> None:
    checkpoints = Checkpoints(directory, CONFIG)
    checkpoints.save(0, state, {})
    checkpoints.close()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(lazy, "CHUNK_BYTES", 256)
    return 256


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (100, 7), (3, 10, 12), (2, 3, 30, 5)])
def test_lazy_arrays_are_saved_in_parts_each_read_once(shape, dtype, tmp_path, small_chunks):
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    array = Recorded(values)
    save(tmp_path, {"params": {"x": array}})
    assert (array.reads == 1).all() and array.largest <= small_chunks
    stored = stored_arrays(tmp_path / "0")["params.x"]
    assert stored.shape == shape and stored.dtype == values.dtype
    index = tuple(slice(size // 3, size) for size in shape)
    np.testing.assert_array_equal(stored.read(index), values[index])


def test_lazy_arrays_are_restored_like_other_arrays(tmp_path, small_chunks):
    values = np.random.default_rng(0).normal(size=(3, 10, 12)).astype(np.float32)
    save(tmp_path, {"params": {"x": Recorded(values), "y": jnp.ones(3)}})
    sharding = SingleDeviceSharding(jax.devices()[2])
    abstract = {
        "params": {
            "x": jax.ShapeDtypeStruct((3, 10, 12), jnp.float32, sharding=sharding),
            "y": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding),
        }
    }
    restored = Checkpoints(tmp_path, CONFIG).restore(abstract)
    assert restored is not None
    found = restored[1]["params"]["x"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, values)


def test_failure_to_read_leaves_no_checkpoint(tmp_path):
    class Broken(Recorded):
        def read(self, index):
            raise OSError("the disk is gone")

    checkpoints = Checkpoints(tmp_path, CONFIG)
    with pytest.raises(OSError, match="the disk is gone"):
        checkpoints.save(0, {"x": Broken(np.ones(3))}, {})
        checkpoints.wait()
    assert Checkpoints(tmp_path, CONFIG).all_steps() == []


@pytest.mark.parametrize("make", [jnp.asarray, Recorded])
def test_layers_of_large_stacks_are_stored_in_separate_chunks(make, tmp_path, small_chunks):
    """One layer can be read without the others; other arrays are divided along any dimension."""
    values = {
        "stack": np.ones((4, 6, 8), np.float32),
        "table": np.ones((64, 8), np.float32),
        "small": np.ones((4, 2, 2), np.float32),
    }
    save(tmp_path, {name: make(value) for name, value in values.items()})
    stored = stored_arrays(tmp_path / "0")
    assert stored["stack"].chunk_shape == (1, 6, 8)
    assert stored["small"].chunk_shape == (4, 2, 2)
    assert stored["table"].chunk_shape[0] > 1
    for array in stored.values():
        assert np.prod(array.chunk_shape) * 4 <= small_chunks


def test_blocks_cover_an_array_once():
    covered = np.zeros((5, 4, 3), int)
    for index in blocks(covered.shape, (2, 4, 2)):
        covered[index] += 1
    assert (covered == 1).all()
    assert list(blocks((), ())) == [()]
