"""Modes of tensor parallelism: the devices that they divide, and the numbers that they refuse."""

import jax
import pytest

from sharding.mesh import FACTORS, MESH_AXES, MeshConfig, describe, make_mesh
from sharding.tensor import TensorConfig, modes_of


@pytest.mark.parametrize(
    ("mode", "depth", "count", "expected"),
    [
        ("1d", 1, 6, (1, 1, 1, 6)),
        ("2d", 1, 9, (1, 3, 1, 3)),
        ("2.5d", 1, 4, (1, 2, 1, 2)),
        ("2.5d", 3, 48, (3, 4, 1, 4)),
        ("3d", 1, 1, (1, 1, 1, 1)),
        ("3d", 1, 343, (1, 7, 7, 7)),
        ("2d_stationary", 1, 1, (1, 1, 1, 1)),
        ("2d_stationary", 1, 4, (1, 1, 2, 2)),
        ("2d_stationary", 1, 8, (1, 1, 2, 4)),
        ("2d_stationary", 1, 9, (1, 1, 3, 3)),
        ("2d_stationary", 1, 64, (1, 1, 4, 16)),
    ],
)
def test_devices_are_a_line_squares_or_a_cube(mode, depth, count, expected):
    tensor = TensorConfig(mode=mode, depth=depth)
    assert tensor.factors(count) == dict(zip(FACTORS, expected, strict=True))
    assert tensor.num_replicas(count) == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("mode", "depth", "count", "sentence"),
    [
        ("2d", 1, 8, "mesh.model=8 must be a square; choose for example 4 or 9"),
        ("2d", 1, -1, "mesh.model=-1 must be a square; choose for example 1 or 4"),
        ("2.5d", 3, 24, r"tensor.depth=3 × a square; choose for example 12 or 27"),
        ("2.5d", 3, 4, r"tensor.depth=3 × a square"),
        ("3d", 1, 9, "mesh.model=9 must be a cube; choose for example 1 or 8"),
        ("2d_stationary", 1, 5, "mesh.model=5 must be a product of two numbers of at least 2"),
    ],
)
def test_other_numbers_are_refused_with_the_nearest(mode, depth, count, sentence):
    with pytest.raises(ValueError, match=sentence):
        TensorConfig(mode=mode, depth=depth).factors(count)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (2, [("1d", 1)]),
        (4, [("1d", 1), ("2d", 1)]),
        (8, [("1d", 1), ("2.5d", 2), ("3d", 1)]),
        (16, [("1d", 1), ("2d", 1), ("2.5d", 4)]),
        (64, [("1d", 1), ("2d", 1), ("2.5d", 4), ("2.5d", 16), ("3d", 1)]),
    ],
)
def test_all_modes_for_training_on_a_number_of_devices(count, expected):
    assert [(tensor.mode, tensor.depth) for tensor in modes_of(count)] == expected


def test_depth_belongs_to_one_mode():
    with pytest.raises(ValueError, match=r"tensor.depth=2 is only for tensor.mode='2.5d'"):
        TensorConfig(mode="2d", depth=2)


def test_factors_are_axes_of_the_mesh_with_the_columns_innermost():
    tensor = TensorConfig(mode="2.5d", depth=2)
    mesh = make_mesh(MeshConfig(model=8), jax.devices(), tensor)
    assert mesh.axis_names == MESH_AXES
    grid = mesh.devices.reshape(2, 2, 2)
    assert [[[device.id for device in row] for row in square] for square in grid] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    assert "depth=2 × row=2 × hidden=1 × model=2" in describe(mesh)
    assert "row" not in describe(make_mesh(MeshConfig(model=8), jax.devices()))
