"""The mesh: the order of its devices, and the configs that are rejected."""

import time
from typing import Any

import jax
import numpy as np
import pytest

from sharding.mesh import AXES, MESH_AXES, MeshConfig, make_mesh


def groups(mesh: jax.sharding.Mesh, axis: str) -> list[list[int]]:
    """Return the device ids of every group along `axis`, in mesh order."""
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    return np.moveaxis(ids, MESH_AXES.index(axis), -1).reshape(-1, mesh.shape[axis]).tolist()


def test_mesh_has_the_documented_axes_all_automatic():
    mesh = make_mesh(MeshConfig(data=2, model=2), jax.devices())
    assert AXES == ("pipeline", "data", "fsdp", "context", "expert", "model")
    assert mesh.axis_names == (*AXES[:-1], "depth", "row", "hidden", "model")
    assert dict(mesh.shape) == {name: {"data": 2, "model": 2}.get(name, 1) for name in MESH_AXES}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_cube_of_8_devices_groups_as_documented():
    mesh = make_mesh(MeshConfig(pipeline=2, data=2, model=2), jax.devices())
    stages = [[device.id for device in stage.flat] for stage in mesh.devices]
    assert stages == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(mesh, "data")[:2] == [[0, 2], [1, 3]]
    assert groups(mesh, "model")[:2] == [[0, 1], [2, 3]]
    assert groups(mesh, "pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("outer, inner", [*zip(AXES[:-1], AXES[1:], strict=True)])
def test_each_axis_is_outside_the_next(outer, inner):
    sizes: Any = {outer: 2, inner: 4}
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    assert groups(mesh, inner) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(mesh, outer) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_minus_one_takes_the_remaining_devices():
    assert make_mesh(MeshConfig(data=-1, model=2), jax.devices()).shape["data"] == 4
    assert MeshConfig(fsdp=-1, pipeline=4).filled_in(16) == MeshConfig(fsdp=4, pipeline=4)
    assert MeshConfig(data=-1, model=8).filled_in(8).data == 1


def test_minus_one_with_a_remainder_names_the_axis_and_the_numbers():
    with pytest.raises(ValueError, match=r"mesh\.data=-1.*model=3.* 3 devices.*\b8 available"):
        make_mesh(MeshConfig(data=-1, model=3), jax.devices())


def test_two_free_axes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"mesh\.data=-1 and mesh\.model=-1: only one"):
        MeshConfig(data=-1, model=-1)


@pytest.mark.parametrize("size", [0, -2])
def test_size_that_is_no_count_is_refused_by_name(size):
    with pytest.raises(
        ValueError, match=rf"mesh\.context={size} must be at least 1, or -1; -1 takes"
    ):
        MeshConfig(context=size)


def test_huge_mesh_is_refused_without_listing_all_its_divisors():
    huge = MeshConfig(model=2**31 - 1, data=2**30, fsdp=2**30, expert=2**30)
    start = time.process_time()
    with pytest.raises(ValueError, match="needs .* devices but 8 are available; meshes that fit"):
        huge.filled_in(8)
    assert time.process_time() - start < 1


def test_too_few_devices_lists_exactly_the_largest_meshes_that_fit():
    config = MeshConfig(pipeline=2, data=2, model=2)
    with pytest.raises(ValueError, match="needs 8 devices but 4 are available") as caught:
        make_mesh(config, jax.devices()[:4])
    listed = str(caught.value).partition("meshes that fit: ")[2].split("; ")
    assert sorted(listed) == ["data=2 × model=2", "pipeline=2 × data=2", "pipeline=2 × model=2"]


def test_free_axis_does_not_hide_too_few_devices():
    with pytest.raises(ValueError, match="needs 16 devices but 8 are available"):
        make_mesh(MeshConfig(data=-1, model=16), jax.devices())


def test_mesh_smaller_than_the_machine_takes_the_first_devices():
    mesh = make_mesh(MeshConfig(data=2), jax.devices())
    assert mesh.devices.flatten().tolist() == jax.devices()[:2]
