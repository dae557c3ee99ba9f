"""Rows of the global batch: which process reads which rows, and where they are placed."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from sharding.batches import batch_sharding, place_batch, process_rows
from sharding.mesh import MeshConfig, make_mesh
from sharding.rules import DEFAULT_RULES


class HeldBy:
    """A sharding as seen by a process that has only some of the devices."""

    def __init__(self, sharding: NamedSharding, device_ids: range):
        self._sharding = sharding
        self._ids = device_ids

    def addressable_devices_indices_map(self, shape):
        everywhere = self._sharding.devices_indices_map(shape)
        return {d: index for d, index in everywhere.items() if d.id in self._ids}


def rows_of(device_ids: range, batch_size: int, **sizes: Any) -> list[int]:
    sharding = batch_sharding(make_mesh(MeshConfig(**sizes), jax.devices()), DEFAULT_RULES)
    return process_rows(HeldBy(sharding, device_ids), batch_size)  # pyright: ignore[reportArgumentType]


def test_one_process_holds_every_row():
    sharding = batch_sharding(make_mesh(MeshConfig(data=4, model=2), jax.devices()), DEFAULT_RULES)
    assert process_rows(sharding, 12) == list(range(12))


def test_processes_along_data_hold_different_rows():
    assert rows_of(range(0, 4), 16, data=4, model=2) == list(range(8))
    assert rows_of(range(4, 8), 16, data=4, model=2) == list(range(8, 16))


def test_processes_along_data_and_fsdp_share_the_rows_out():
    rows = [rows_of(range(i, i + 2), 16, data=2, fsdp=4) for i in range(0, 8, 2)]
    assert rows == [list(range(i, i + 4)) for i in range(0, 16, 4)]


@pytest.mark.parametrize("axis", ["pipeline", "context", "expert", "model"])
def test_processes_along_other_axes_hold_the_same_rows(axis):
    for ids in (range(0, 4), range(4, 8)):
        assert rows_of(ids, 6, **{axis: 8}) == list(range(6))


def test_stages_in_two_processes_both_hold_every_row():
    for ids in (range(0, 4), range(4, 8)):
        assert rows_of(ids, 8, pipeline=2, data=2, model=2) == list(range(8))


@pytest.mark.parametrize(
    "sizes", [{}, {"data": 8}, {"pipeline": 2, "fsdp": 2, "model": 2}], ids=str
)
def test_place_batch_puts_every_row_in_its_place(sizes):
    sharding = batch_sharding(make_mesh(MeshConfig(**sizes), jax.devices()), DEFAULT_RULES)
    batch = {
        "tokens": np.arange(16 * 3, dtype=np.int32).reshape(16, 3),
        "index": np.arange(16, dtype=np.uint32),
    }
    placed = place_batch(batch, process_rows(sharding, 16), sharding, 16)
    for name, array in batch.items():
        assert placed[name].dtype == array.dtype
        assert placed[name].sharding.is_equivalent_to(sharding, array.ndim)
        np.testing.assert_array_equal(placed[name], array)
        for shard in placed[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, array[shard.index])


def test_place_batch_reads_only_the_rows_that_this_process_holds(monkeypatch):
    """One of two processes: its 8 local rows are rows 8..15 of the global batch."""
    sharding = batch_sharding(make_mesh(MeshConfig(data=4, model=2), jax.devices()), DEFAULT_RULES)
    rows = rows_of(range(4, 8), 16, data=4, model=2)
    pieces = {}

    def make(shape, sharding, piece):
        assert shape == (16, 3)
        for device, index in sharding.devices_indices_map(shape).items():
            if device.id >= 4:
                pieces[device.id] = piece(index)

    monkeypatch.setattr(jax, "make_array_from_callback", make)
    everything = np.arange(16 * 3).reshape(16, 3)
    place_batch({"tokens": everything[rows]}, rows, sharding, 16)
    for device_id, first in ((4, 8), (5, 8), (6, 12), (7, 12)):
        np.testing.assert_array_equal(pieces[device_id], everything[first : first + 4])
