"""The table from logical axes to mesh axes: the specs it produces, and the ones it rejects."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import BATCH_AXES, MeshConfig, make_mesh
from sharding.rules import (
    DEFAULT_RULES,
    make_rules,
    partition_specs,
    shardings,
    split_first_dims,
    to_spec,
    unused_axes,
)
from sharding.tensor import TensorConfig

#: Axes that split the dim of a parameter that is called "embed".
EMBED = ("fsdp", "row", "hidden")


def tensor(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    "axes, spec",
    [
        (("embed", "mlp"), PartitionSpec(EMBED, "model")),
        (("layers", "embed", None, "heads"), PartitionSpec("pipeline", EMBED, None, "model")),
        (("batch", "seq", "act_embed"), PartitionSpec(BATCH_AXES, "context", "hidden")),
        (("head_dim",), PartitionSpec(None)),
        ((), PartitionSpec()),
    ],
    ids=str,
)
def test_to_spec_follows_the_table(axes, spec):
    assert to_spec(axes, DEFAULT_RULES) == spec


def test_to_spec_refuses_two_dims_over_one_mesh_axis_and_names_both():
    with pytest.raises(ValueError, match="'heads' and 'mlp' are both split over mesh axis 'model'"):
        to_spec(("heads", "embed", "mlp"), DEFAULT_RULES)


def test_to_spec_refuses_an_unknown_name_with_the_known_ones_and_a_remedy():
    with pytest.raises(ValueError, match=r"'colour' has no rule; known: .*vocab.*rules\.colour="):
        to_spec(("embed", "colour"), DEFAULT_RULES)


def test_overrides_add_and_replace_rows_without_changing_the_table():
    before = dict(DEFAULT_RULES)
    rules = make_rules({"colour": "expert", "embed": ["data", "fsdp"], "mlp": None})
    assert to_spec(("colour", "embed", "mlp"), rules) == PartitionSpec(
        "expert", ("data", "fsdp"), None
    )
    assert rules["heads"] == DEFAULT_RULES["heads"]
    assert DEFAULT_RULES == before


@pytest.mark.parametrize("axes", ["modle", ("data", "modle"), 3, ("data", 3)], ids=str)
def test_override_with_no_mesh_axis_names_the_row_and_the_axes(axes):
    with pytest.raises(ValueError, match=r"rules\.mlp=.*choose from pipeline, data, fsdp"):
        make_rules({"mlp": axes})


def test_partition_specs_keeps_the_tree():
    mesh = make_mesh(MeshConfig(fsdp=2, model=2), jax.devices())
    tree = {"a": {"kernel": tensor(4, 6)}, "b": tensor(5)}
    axes = {"a": {"kernel": ("embed", "mlp")}, "b": (None,)}
    assert partition_specs(tree, axes, DEFAULT_RULES, mesh) == {
        "a": {"kernel": PartitionSpec(EMBED, "model")},
        "b": PartitionSpec(None),
    }


def refusal(shape, axes, rules=DEFAULT_RULES, mode="1d", **mesh: Any) -> str:
    """Return the error message for a single parameter, `block.kernel`, that must be rejected."""
    with pytest.raises(ValueError) as caught:
        partition_specs(
            {"block": {"kernel": tensor(*shape)}},
            {"block": {"kernel": axes}},
            rules,
            make_mesh(MeshConfig(**mesh), jax.devices(), TensorConfig(mode=mode)),
        )
    return str(caught.value)


def test_indivisible_dimension_names_values_rule_place_and_choices():
    message = refusal((5, 12), ("embed", "heads"), model=8)
    assert message.startswith("mesh.model=8 must divide heads=12")
    assert "dimension 1 of block.kernel" in message and "(5, 12)" in message
    assert message.endswith("choose from 1, 2, 3, 4, 6, 12")


def test_indivisible_dimension_names_the_axes_of_a_tensor_mode():
    """In `2d`, the four devices of mesh.model are two rows of two."""
    message = refusal((4, 5), ("embed", "heads"), mode="2d", model=4)
    assert message.startswith("tensor.mode's model=2 must divide heads=5")


def test_indivisible_dimension_over_two_mesh_axes_names_both():
    message = refusal((6,), ("embed",), make_rules({"embed": ("data", "fsdp")}), data=2, fsdp=2)
    assert message.startswith("mesh.data=2 × mesh.fsdp=2 must divide embed=6")


def test_collision_and_unknown_name_name_the_parameter():
    assert "parameter block.kernel: " in refusal((4, 4), ("mlp", "heads"))
    assert "parameter block.kernel: " in refusal((4, 4), ("mlp", "colour"))


def test_axes_of_another_rank_name_the_parameter_and_its_shape():
    message = refusal((4, 6), ("embed",))
    assert "block.kernel" in message and "(4, 6)" in message and "('embed',)" in message


def test_shardings_follow_the_specs():
    mesh = make_mesh(MeshConfig(data=2, model=4), jax.devices())
    specs = {"x": PartitionSpec("data", "model"), "scalar": PartitionSpec()}
    made = shardings(mesh, specs)
    assert made["scalar"] == NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(jnp.zeros((4, 8)), made["x"])
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 2)}


def test_unused_axes_are_those_that_only_repeat_work():
    mesh = make_mesh(MeshConfig(data=2, model=2), jax.devices())
    specs = {"kernel": PartitionSpec(None, ("fsdp", "model")), "bias": PartitionSpec()}
    assert unused_axes(specs, DEFAULT_RULES, mesh) == []
    assert unused_axes({"bias": PartitionSpec()}, DEFAULT_RULES, mesh) == ["model"]


@pytest.mark.parametrize(
    ("sizes", "spec", "is_layers", "expected"),
    [
        ((8, 6), (None, "fsdp"), False, ("fsdp", None)),
        ((8, 6), ("data", "fsdp"), False, (("data", "fsdp"), None)),
        (
            (3, 8, 6),
            ("pipeline", None, ("fsdp", "data")),
            True,
            ("pipeline", ("fsdp", "data"), None),
        ),
        ((8, 6), ("model", "fsdp"), False, ("model", "fsdp")),  # XLA splits the first dim itself
        ((7, 6), (None, "fsdp"), False, (None, "fsdp")),  # the axes do not divide it
        ((3, 6), ("pipeline", "fsdp"), True, ("pipeline", "fsdp")),
        ((8,), ("fsdp",), False, ("fsdp",)),
        ((), (), False, ()),
    ],
    ids=str,
)
def test_axes_that_divide_state_at_rest_split_the_first_dim(sizes, spec, is_layers, expected):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2), jax.devices())
    specs = split_first_dims(
        {"w": PartitionSpec(*spec)}, {"w": tensor(*sizes)}, {"w": is_layers}, mesh
    )
    assert specs == {"w": PartitionSpec(*expected)}
