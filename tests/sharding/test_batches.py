"""Rows of the global batch: which process reads which rows, and where they are placed."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from sharding.batches import BatchLayout, place_batch, process_rows
from sharding.mesh import MeshConfig, make_mesh
from sharding.ops.sequence import SequenceSplit


class HeldBy:
    """A sharding as seen by a process that has only some of the devices."""

    def __init__(self, sharding: NamedSharding, device_ids: range):
        self._sharding = sharding
        self._ids = device_ids

    def addressable_devices_indices_map(self, shape):
        everywhere = self._sharding.devices_indices_map(shape)
        return {d: index for d, index in everywhere.items() if d.id in self._ids}


def layout_on(**sizes: Any) -> BatchLayout:
    return BatchLayout(mesh=make_mesh(MeshConfig(**sizes), jax.devices()))


def rows_of(device_ids: range, batch_size: int, **sizes: Any) -> list[int]:
    sharding = layout_on(**sizes).sharding("index")
    return process_rows(HeldBy(sharding, device_ids), batch_size)  # pyright: ignore[reportArgumentType]


def test_one_process_holds_every_row():
    assert process_rows(layout_on(data=4, model=2).sharding("index"), 12) == list(range(12))


def test_processes_along_data_hold_different_rows():
    assert rows_of(range(0, 4), 16, data=4, model=2) == list(range(8))
    assert rows_of(range(4, 8), 16, data=4, model=2) == list(range(8, 16))


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"data": 2, "expert": 4}], ids=str)
def test_processes_along_axes_of_the_batch_share_the_rows_out(sizes):
    rows = [rows_of(range(i, i + 2), 16, **sizes) for i in range(0, 8, 2)]
    assert rows == [list(range(i, i + 4)) for i in range(0, 16, 4)]


@pytest.mark.parametrize("axis", ["pipeline", "context", "model"])
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
    layout = layout_on(**sizes)
    sharding = layout.sharding("index")
    batch = {
        "tokens": np.arange(16 * 3, dtype=np.int32).reshape(16, 3),
        "index": np.arange(16, dtype=np.uint32),
    }
    placed = place_batch(batch, process_rows(sharding, 16), layout, 16)
    for name, array in batch.items():
        assert placed[name].dtype == array.dtype
        assert placed[name].sharding.is_equivalent_to(sharding, array.ndim)
        np.testing.assert_array_equal(placed[name], array)
        for shard in placed[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, array[shard.index])


def test_place_batch_reads_only_the_rows_that_this_process_holds(monkeypatch):
    """One of two processes: its 8 local rows are rows 8..15 of the global batch."""
    layout = layout_on(data=4, model=2)
    rows = rows_of(range(4, 8), 16, data=4, model=2)
    pieces = {}

    def make(shape, sharding, piece):
        assert shape == (16, 3)
        for device, index in sharding.devices_indices_map(shape).items():
            if device.id >= 4:
                pieces[device.id] = piece(index)

    monkeypatch.setattr(jax, "make_array_from_callback", make)
    everything = np.arange(16 * 3).reshape(16, 3)
    place_batch({"tokens": everything[rows]}, rows, layout, 16)
    for device_id, first in ((4, 8), (5, 8), (6, 12), (7, 12)):
        np.testing.assert_array_equal(pieces[device_id], everything[first : first + 4])


@pytest.mark.parametrize("ring_size", [1, 2, 4])
def test_place_batch_puts_tokens_in_the_order_of_the_devices(ring_size):
    mesh = make_mesh(MeshConfig(data=2, context=4), jax.devices())
    names = frozenset({"tokens"})
    split = SequenceSplit(num_devices=4, ring_size=ring_size, arrays=names)
    layout = BatchLayout(mesh=mesh, sequence=split)
    batch = {
        "tokens": np.arange(4 * 16, dtype=np.int32).reshape(4, 16),
        "weights": np.arange(4 * 16, dtype=np.float32).reshape(4, 16),
    }
    placed = place_batch(batch, [0, 1, 2, 3], layout, 4)
    in_order = batch["tokens"][:, split.order(16)]
    np.testing.assert_array_equal(placed["tokens"], in_order)
    np.testing.assert_array_equal(placed["weights"], batch["weights"])
    for shard in placed["tokens"].addressable_shards:
        assert shard.data.shape == (2, 4)
        np.testing.assert_array_equal(shard.data, in_order[shard.index])
