"""ZeRO: the dim of a parameter that is split over `data`, and the checks of its settings."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from sharding.memory import MemoryConfig
from sharding.mesh import MeshConfig, make_mesh
from sharding.spec import axes_by_dim
from sharding.zero import spec_of_state, split_over_replicas


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "spec", "is_layers", "expected"),
    [
        pytest.param((6, 8), P(), False, P(None, "data"), id="the largest"),
        pytest.param((8, 8), P(), False, P("data", None), id="of equal ones the first"),
        pytest.param((8, 64), P("fsdp"), False, P(("fsdp", "data"), None), id="with fsdp"),
        pytest.param((6, 64), P("fsdp"), False, P("fsdp", "data"), id="where fsdp leaves too few"),
        pytest.param((8, 4), P("pipeline"), True, P("pipeline", "data"), id="not the layers"),
        pytest.param((64, 8), P("model"), False, P("model", "data"), id="not what XLA splits"),
        pytest.param((8, 64), P("pipeline", "model"), True, P("pipeline", "model"), id="a bias"),
        pytest.param((7, 9), P(), False, P(), id="odd"),
        pytest.param((), P(), False, P(), id="scalar"),
        pytest.param((8, 8), P("data"), False, P("data"), id="split by a rule"),
    ],
)
def test_dim_that_is_split(sizes, spec, is_layers, expected):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2), jax.devices())
    found = split_over_replicas({"w": spec}, {"w": shape(*sizes)}, {"w": is_layers}, mesh)
    assert found == {"w": expected}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 6), P(("data", "context"), None)),
        ((6, 8), P(None, ("data", "context"))),
        ((6, 3), P("data", None)),
    ],
)
def test_context_devices_are_replicas(sizes, expected):
    mesh = make_mesh(MeshConfig(data=2, context=4), jax.devices())
    assert split_over_replicas([P()], [shape(*sizes)], [False], mesh) == [expected]


def test_nothing_is_split_with_one_replica():
    mesh = make_mesh(MeshConfig(model=2), jax.devices())
    assert split_over_replicas([P("model")], [shape(8, 8)], [False], mesh) == [P("model")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero_stage": 4}, r"memory\.zero_stage=4 is unknown; choose 0, 1, 2 or 3"),
        (
            {"zero_stage": 3, "shard_parameters_fraction": 1.5},
            r"memory\.shard_parameters_fraction=1\.5 must be from 0 to 1",
        ),
    ],
)
def test_config_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**fields)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param((6, 12, 16), P("pipeline", "data", "model"), id="like the parameter"),
        pytest.param((8, 3, 5, 5), P(("pipeline", "data", "model")), id="by layers"),
        pytest.param((6, 4, 5, 5), P("pipeline", ("data", "model")), id="by blocks"),
        pytest.param((6, 1, 8, 8), P("pipeline", None, ("data", "model")), id="by rows"),
        pytest.param((6, 2, 5, 5), P("pipeline", "data"), id="over some axes"),
        pytest.param((6, 1, 5, 5), P("pipeline"), id="only over stages"),
        pytest.param((6, 12), P("pipeline", "data"), id="a factor of the moments"),
        pytest.param((), P(), id="no dim of the parameter"),
    ],
)
def test_state_of_another_shape_is_divided_as_far_as_its_dims_divide(sizes, expected):
    mesh = make_mesh(MeshConfig(pipeline=2, data=2, model=2), jax.devices())
    param = (*sizes[:1], 12, 16)
    state_spec = spec_of_state(sizes, param, P("pipeline", "data", "model"), mesh)
    assert axes_by_dim(state_spec, len(sizes)) == axes_by_dim(expected, len(sizes))
