"""Logical axes where models use them: outside a mesh, inside a jit, inside a shard_map.

Covers `constrain`, sums over parts of the vocabulary, and functions of the whole batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pipeline.runtime.gather import on_shards
from sharding.logical import (
    axis_rules,
    constrain,
    constrain_residual,
    first_example,
    gather_batch,
    gather_tokens,
    manual_axes,
    max_over,
    offset,
    on_whole_tokens,
    scatter_tokens,
    sum_over,
    sum_over_batch,
)
from sharding.mesh import MeshConfig, make_mesh
from sharding.rules import DEFAULT_RULES, make_rules


def x(*shape: int) -> jax.Array:
    return jnp.arange(float(np.prod(shape))).reshape(shape)


def local_shape(rules, axes, **sizes: Any) -> tuple[int, ...]:
    """Return the shape of a device's shard of an (8, 4) array constrained inside a jit."""
    with jax.set_mesh(make_mesh(MeshConfig(**sizes), jax.devices())), axis_rules(rules):
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
    with jax.set_mesh(make_mesh(MeshConfig(data=2), jax.devices())):
        assert constrain(array, "batch", None) is array


def test_inside_a_jit_the_rules_split_the_array():
    assert local_shape(DEFAULT_RULES, ("batch", "mlp"), data=2, model=4) == (4, 1)
    assert local_shape(DEFAULT_RULES, ("batch", None), data=2, fsdp=2) == (2, 4)
    assert local_shape(make_rules({"batch": "model"}), ("batch", None), data=2, model=4) == (2, 4)


def tokens_shape(function, batch: int, length: int, **sizes: Any) -> tuple[int, ...]:
    """Return the shape of a device's part of [batch, length, 3], after a function."""
    array = x(batch, length, 3)
    with jax.set_mesh(make_mesh(MeshConfig(**sizes), jax.devices())), axis_rules(DEFAULT_RULES):
        y = jax.jit(lambda a: function(a))(array)  # a new function: jit does not see the rules
    np.testing.assert_array_equal(y, array)
    return y.addressable_shards[0].data.shape


@pytest.mark.drawn(1)
@pytest.mark.parametrize("function", [scatter_tokens, constrain_residual])
def test_tokens_are_split_between_branches_and_whole_within_them(function):
    assert tokens_shape(function, 1, 4, model=2) == (1, 2, 3)
    assert tokens_shape(function, 8, 4, model=2) == (4, 4, 3)
    assert tokens_shape(function, 2, 4, data=2, model=2) == (1, 2, 3)
    assert tokens_shape(lambda a: gather_tokens(function(a)), 8, 4, model=2) == (8, 4, 3)
    assert tokens_shape(lambda a: gather_tokens(function(a)), 8, 4, data=2, model=2) == (4, 4, 3)


def test_tokens_that_the_axes_do_not_divide_stay_whole():
    assert tokens_shape(scatter_tokens, 3, 5, model=2) == (3, 5, 3)
    assert tokens_shape(constrain_residual, 8, 5, data=8) == (1, 5, 3)


def test_sequence_split_by_context_stays_as_it_is():
    assert tokens_shape(constrain_residual, 8, 4, context=2, model=2) == (8, 2, 3)


def test_functions_outside_blocks_see_whole_tokens():
    def inside(array):
        return on_whole_tokens(lambda tree: constrain_residual(tree["x"]), {"x": array})

    assert tokens_shape(lambda a: inside(constrain_residual(a)), 8, 4, model=2) == (8, 4, 3)
    assert tokens_shape(lambda a: constrain_residual(inside(a)), 8, 4, model=2) == (4, 4, 3)


def test_tokens_stay_whole_without_axes_or_without_a_mesh():
    array = x(8, 4, 3)
    whole = make_rules({"act_tokens": None})
    with jax.set_mesh(make_mesh(MeshConfig(model=2), jax.devices())), axis_rules(whole):
        assert gather_tokens(array) is array and scatter_tokens(array) is array
    assert gather_tokens(array) is array and constrain_residual(array) is array  # without a mesh


def test_axes_of_size_one_leave_the_array_unchanged():
    array = x(8, 4)
    with jax.set_mesh(make_mesh(MeshConfig(data=2), jax.devices())), axis_rules(DEFAULT_RULES):
        assert constrain(array, "seq", "mlp") is array


def test_rules_end_with_their_block():
    mesh = make_mesh(MeshConfig(data=2), jax.devices())
    with jax.set_mesh(mesh):
        with axis_rules(DEFAULT_RULES):
            with axis_rules(make_rules({"colour": ()})):
                constrain(x(2), "colour")
            with pytest.raises(ValueError, match="'colour' has no rule; known: .*batch"):
                constrain(x(2), "colour")
        constrain(x(2), "colour")


def test_another_rank_is_refused_with_axes_and_shape():
    with jax.set_mesh(make_mesh(MeshConfig(data=2), jax.devices())), axis_rules(DEFAULT_RULES):
        with pytest.raises(ValueError, match=r"2 axes, but x has shape \(2, 3, 4\)"):
            constrain(x(2, 3, 4), "batch", "seq")


def test_inside_a_partly_manual_shard_map_only_the_automatic_axes_are_used():
    mesh = make_mesh(MeshConfig(data=2, model=4), jax.devices())

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
    mesh = make_mesh(MeshConfig(data=2, model=4), jax.devices())

    def local(a):
        with axis_rules(DEFAULT_RULES):
            assert constrain(a, "batch", "mlp") is a
        return a

    spec = PartitionSpec("data", "model")
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).lower(x(8, 8))


#: Rules that split the vocabulary over `pipeline`, and meshes with their number of manual parts.
SHARED = make_rules(shares_vocab=True)
SPLITS = {
    "pipeline=4": ({"pipeline": 4}, 4),
    "pipeline=2 model=2": ({"pipeline": 2, "model": 2}, 2),
    "pipeline=2 data=2": ({"pipeline": 2, "data": 2}, 2),
}


def over_parts(function, mesh, rules=SHARED):
    """Run `function(part, whole)` on every stage, and stack the results.

    The first argument is split over the stages, the second is replicated.
    """
    split = PartitionSpec("pipeline")
    whole = PartitionSpec()

    def local(part, other):
        with axis_rules(rules):
            return jax.tree.map(lambda a: jnp.asarray(a)[None], function(part, other))

    return jax.jit(on_shards(local, mesh, (split, whole), split))


@pytest.mark.parametrize("sizes, num_parts", SPLITS.values(), ids=SPLITS)
def test_offset_numbers_the_entries_of_a_split_axis(sizes, num_parts):
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    with jax.set_mesh(mesh):
        found = over_parts(lambda part, _: offset("vocab", len(part)), mesh)(x(8), x(1))
    # Only manual axes count: the split over `model` is automatic and invisible to the program.
    np.testing.assert_array_equal(found, np.arange(num_parts) * 8 // num_parts)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sizes, num_parts", SPLITS.values(), ids=SPLITS)
def test_sum_over_gives_all_parts_the_sum_and_its_gradient(sizes, num_parts):
    """Every part receives the same sum and the whole gradient of it, which is not summed again."""
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())

    def function(part, scale):
        return jax.value_and_grad(lambda part: scale[0] * sum_over("vocab", jnp.sum(part**2)))(part)

    with jax.set_mesh(mesh):
        values, gradients = over_parts(function, mesh)(x(8), jnp.array([3.0]))
    np.testing.assert_array_equal(values, np.full(num_parts, 3.0 * np.sum(np.arange(8) ** 2)))
    np.testing.assert_array_equal(gradients.reshape(8), 3.0 * 2.0 * np.arange(8))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sizes, num_parts", SPLITS.values(), ids=SPLITS)
def test_max_over_gives_all_parts_the_largest_and_no_gradient(sizes, num_parts):
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())

    def function(part, _):
        return jax.value_and_grad(lambda part: max_over("vocab", jnp.max(part)) + 2 * part[0])(part)

    data = jnp.array([0.0, 5.0, -1.0, 2.0, 7.0, 3.0, -4.0, 1.0])
    with jax.set_mesh(mesh):
        values, gradients = over_parts(function, mesh)(data, x(1))
    firsts = data[:: 8 // num_parts]
    np.testing.assert_array_equal(values, 7.0 + 2 * firsts)
    wanted = np.zeros((num_parts, 8 // num_parts))
    wanted[:, 0] = 2.0
    np.testing.assert_array_equal(gradients, wanted)


def test_parts_are_the_whole_outside_a_mesh_and_without_rules():
    array = x(4)
    assert offset("vocab", 4) == 0
    assert sum_over("vocab", array) is array
    np.testing.assert_array_equal(max_over("vocab", array), array)
    with axis_rules(SHARED):
        assert manual_axes("vocab") == () and sum_over("vocab", array) is array
    with jax.set_mesh(make_mesh(MeshConfig(pipeline=4), jax.devices())):
        assert manual_axes("vocab") == () and sum_over("vocab", array) is array
        with axis_rules(SHARED):  # outside a shard_map the pipeline axis is not manual
            assert manual_axes("vocab") == ()
            assert offset("vocab", 4) == 0


@pytest.mark.parametrize(
    "sizes, rules",
    [({"pipeline": 4}, DEFAULT_RULES), ({"model": 4}, SHARED), ({"data": 4}, SHARED)],
    ids=["not shared", "one stage", "one stage of four replicas"],
)
def test_parts_are_the_whole_vocab_if_stages_do_not_share_it(sizes, rules):
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())

    def function(part, common):
        assert manual_axes("vocab") == ()
        assert sum_over("vocab", part) is part
        return jax.value_and_grad(
            lambda p: (
                jnp.sum(sum_over("vocab", p) ** 2)
                + jnp.sum(max_over("vocab", p))
                + offset("vocab", 8)
            )
        )(part)

    with jax.set_mesh(mesh):
        values, gradients = over_parts(function, mesh, rules)(x(4), x(1))
    np.testing.assert_array_equal(np.sum(values), 14.0 + 6.0)
    np.testing.assert_array_equal(gradients.reshape(4), 2.0 * np.arange(4))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "sizes", [{"data": 4}, {"fsdp": 2, "data": 2}, {"data": 2, "model": 2}, {"model": 2}], ids=str
)
def test_functions_of_the_whole_batch_are_equal_on_every_mesh(sizes):
    """Gradients of a loss that compares each example with all others do not depend on the mesh.

    They depend on how the executor splits the batch, not on the rule for the "batch" axis, which is
    deliberately different here.
    """
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    rules = make_rules({"batch": "data"})
    data = jnp.asarray([1.0, -2.0, 0.5, 3.0, 0.25, -1.0, 2.0, 4.0])

    def loss(part):
        centred = part - sum_over_batch(jnp.sum(part)) / 8
        everybody = gather_batch(part)
        own = jax.lax.dynamic_slice_in_dim(everybody, first_example(part.size), part.size)
        return jnp.sum(centred**3 + own * part + jnp.max(everybody) * part)

    expected = jax.grad(loss)(data)  # outside a mesh a device has the whole batch

    def local(part):
        with axis_rules(rules):
            return jax.grad(loss)(part)

    batch = PartitionSpec(("data", "fsdp"))
    with jax.set_mesh(mesh):
        found = jax.jit(on_shards(local, mesh, (batch,), batch))(data)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
