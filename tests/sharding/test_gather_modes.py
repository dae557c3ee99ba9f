"""Which parameters of a stack are gathered by layer, and which are read from host memory."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from sharding.gather_modes import GatherMode, stack_gather_modes
from sharding.memory import MemoryConfig
from sharding.mesh import MeshConfig, make_mesh
from sharding.tensor import TensorConfig

ONCE, BY_LAYER, STREAMED = GatherMode.ONCE, GatherMode.BY_LAYER, GatherMode.STREAMED
PARAMS = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (1, 6, 2)]


def modes(specs, **fields) -> list[GatherMode]:
    mesh = make_mesh(MeshConfig(data=2), jax.devices())
    return stack_gather_modes(PARAMS, specs, mesh, MemoryConfig(**fields))


@pytest.mark.parametrize(
    ("stage", "fraction", "expected"),
    [
        (3, 1.0, [BY_LAYER, BY_LAYER, BY_LAYER]),
        (3, 0.7, [ONCE, BY_LAYER, BY_LAYER]),  # 6 of 9 elements are below 0.7: one more is taken
        (3, 0.5, [ONCE, BY_LAYER, ONCE]),
        (3, 0.0, [ONCE, ONCE, ONCE]),
        (2, 1.0, [ONCE, ONCE, ONCE]),
    ],
)
def test_largest_come_first_until_the_fraction_is_reached(stage, fraction, expected):
    fields = {"shard_parameters_fraction": fraction} if stage == 3 else {}
    assert modes([P("data")] * 3, zero_stage=stage, **fields) == expected


def test_parts_that_are_exchanged_cannot_be_read_from_the_host_by_layer():
    tensor = TensorConfig(mode="3d")
    mesh = make_mesh(MeshConfig(model=8), jax.devices(), tensor)
    config = MemoryConfig(placement="host", offload_parameters_fraction=1.0)
    with pytest.raises(ValueError, match="row and hidden split the same dimension of one"):
        stack_gather_modes(PARAMS, [P(("row", "hidden"))] * 3, mesh, config)


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, BY_LAYER), (0.0, ONCE)])
def test_what_fsdp_splits_is_gathered_by_layer_unless_told_otherwise(fraction, expected):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2), jax.devices())
    specs = [P("fsdp"), P(("fsdp", "data")), P()]
    config = MemoryConfig(shard_parameters_fraction=fraction)
    assert stack_gather_modes(PARAMS, specs, mesh, config) == [expected, expected, ONCE]


def test_replicated_parameters_are_not_read_from_host_memory():
    hosted = {"placement": "host", "offload_parameters_fraction": 1.0}
    specs = [P(), P("data"), P("data")]
    assert modes(specs, zero_stage=1, **hosted) == [ONCE, STREAMED, STREAMED]
    assert modes(specs, zero_stage=3, **hosted) == [BY_LAYER, STREAMED, STREAMED]
