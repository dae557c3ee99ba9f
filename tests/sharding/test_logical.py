"""`constrain` wherever a model may call it: without a mesh, in a jit, in a shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding.logical import axis_rules, constrain
from sharding.mesh import MeshConfig, make_mesh
from sharding.rules import DEFAULT_RULES, make_rules


def x(*shape: int) -> jax.Array:
    return jnp.arange(float(np.prod(shape))).reshape(shape)


def local_shape(rules, axes, **sizes: int) -> tuple[int, ...]:
    """Returns a device's part of an (8, 4) array that is constrained inside a jit."""
    with jax.set_mesh(make_mesh(MeshConfig(**sizes))), axis_rules(rules):
        y = jax.jit(lambda a: constrain(a, *axes) * 1.0)(x(8, 4))
    np.testing.assert_array_equal(y, x(8, 4))
    return y.addressable_shards[0].data.shape


def test_outside_a_mesh_nothing_happens_and_no_name_is_looked_up():
    array = x(2, 3)
    assert constrain(array, "batch", "no such axis") is array
    with axis_rules(DEFAULT_RULES):
        assert constrain(array, "batch", "no such axis") is array


def test_inside_a_mesh_without_rules_nothing_happens():
    array = x(2, 3)
    with jax.set_mesh(make_mesh(MeshConfig(data=2))):
        assert constrain(array, "batch", None) is array


def test_inside_a_jit_the_rules_split_the_array():
    assert local_shape(DEFAULT_RULES, ("batch", "mlp"), data=2, model=4) == (4, 1)
    assert local_shape(DEFAULT_RULES, ("batch", None), data=2, fsdp=2) == (2, 4)
    assert local_shape(make_rules({"batch": "model"}), ("batch", None), data=2, model=4) == (2, 4)


def test_axes_of_one_device_leave_the_array_alone():
    array = x(8, 4)
    with jax.set_mesh(make_mesh(MeshConfig(data=2))), axis_rules(DEFAULT_RULES):
        assert constrain(array, "seq", "mlp") is array


def test_rules_end_with_their_block():
    mesh = make_mesh(MeshConfig(data=2))
    with jax.set_mesh(mesh):
        with axis_rules(DEFAULT_RULES):
            with axis_rules(make_rules({"colour": ()})):
                constrain(x(2), "colour")
            with pytest.raises(ValueError, match="'colour' is in no rule; known: .*batch"):
                constrain(x(2), "colour")
        constrain(x(2), "colour")


def test_another_rank_is_refused_with_axes_and_shape():
    with jax.set_mesh(make_mesh(MeshConfig(data=2))), axis_rules(DEFAULT_RULES):
        with pytest.raises(ValueError, match=r"2 axes of an array of shape \(2, 3, 4\)"):
            constrain(x(2, 3, 4), "batch", "seq")


def test_inside_a_partly_manual_shard_map_only_the_automatic_axes_are_used():
    mesh = make_mesh(MeshConfig(data=2, model=4))

    def local(a):
        assert a.shape == (4, 8)  # `data` is manual: this is one replica's half
        with axis_rules(DEFAULT_RULES):
            a = constrain(a, "batch", "mlp")
        return a * 2.0

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        axis_names=set(mesh.axis_names) - {"model"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(mapped).lower(x(8, 8))
        y = jax.jit(mapped)(x(8, 8))
    np.testing.assert_array_equal(y, 2.0 * x(8, 8))
    constraints = [line for line in lowered.as_text().splitlines() if "constraint" in line]
    assert any('[{}, {"model"}]' in line for line in constraints)
    assert not any('"data"' in line for line in constraints)


def test_inside_a_wholly_manual_shard_map_nothing_happens():
    mesh = make_mesh(MeshConfig(data=2, model=4))

    def local(a):
        with axis_rules(DEFAULT_RULES):
            assert constrain(a, "batch", "mlp") is a
        return a

    spec = PartitionSpec("data", "model")
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).lower(x(8, 8))
