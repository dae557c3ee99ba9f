"""The table from logical axes to mesh axes, and its checks.

A parameter carries a logical name per dimension. `partition_specs` translates the names into
`PartitionSpec`s for a mesh, and rejects parameters that cannot be sharded that way:

    kernel of an MLP     ("layers", "embed", "mlp")
    PartitionSpec        ("pipeline", "fsdp", "model")
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sharding.logical import Rules, to_spec
from sharding.mesh import AXES, BATCH_AXES, MESH_AXES, REPLICA_AXES, SHARD_AXES, AnyMesh
from sharding.spec import axes_by_dim, axes_of, is_spec, spec_of, without
from sharding.tensor import FACTORS

#: Logical axis -> mesh axes over which the dimension is split, major first.
#: An `act_` name exists only if activations can be sharded differently from other arrays.
DEFAULT_RULES: Rules = {
    "batch": BATCH_AXES,  # within a step it is always split over these
    "seq": ("context",),  # and this over this one
    "act_tokens": ("model",),  # the tokens of all sequences, between the branches of a block
    "embed": (*SHARD_AXES, "hidden"),
    "act_embed": ("hidden",),
    # Heads, mlp and vocab of activations, in addition to the axes of these rows.
    "act_branch": ("hidden",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "head_dim": (),
    "mlp": ("model",),
    "vocab": ("model",),
    "layers": ("pipeline",),
    "experts": ("expert",),  # or several axes of different examples or tokens
}


def make_rules(overrides: Mapping[str, Any] | None = None, *, shares_vocab: bool = False) -> Rules:
    """Return the table with rows from a config added or replaced.

    Args:
        overrides: logical axis -> a mesh axis, or a sequence of them; None splits over no axis.
        shares_vocab: split the vocabulary over the pipeline stages first.

    Raises:
        ValueError: a row names an axis that the mesh does not have, or splits an axis other than
            `layers` over the pipeline.
    """
    rules = dict(DEFAULT_RULES)
    for name, axes in (overrides or {}).items():
        axes = () if axes is None else tuple(axes) if isinstance(axes, list | tuple) else (axes,)
        for axis in axes:
            if axis not in MESH_AXES:
                raise ValueError(
                    f"rules.{name}={axes}: unknown mesh axis {axis!r}; choose from "
                    f"{', '.join(MESH_AXES)}"
                )
            if axis == "pipeline" and name != "layers":
                raise ValueError(
                    f"rules.{name}={axes}: only layers can be split over 'pipeline'; remove it, or "
                    "set pipeline.share_vocab=True to split the vocab"
                )
        rules[name] = axes
    if shares_vocab:
        rules["vocab"] = ("pipeline", *rules["vocab"])
    return rules


def rules_on(mesh: AnyMesh) -> Rules:
    """Return the default rules for a mesh, which may have only some of our axes."""
    return {
        name: tuple(axis for axis in axes if axis in mesh.shape)
        for name, axes in make_rules().items()
    }


def partition_specs(abstract: Any, logical_axes: Any, rules: Rules, mesh: AnyMesh) -> Any:
    """Return the PartitionSpec of every parameter, checked against the mesh.

    Args:
        abstract: tree of arrays or ShapeDtypeStructs.
        logical_axes: the same tree with a tuple of logical names per leaf.
        rules: logical axis -> mesh axes.
        mesh: mesh that the specs are for.

    Raises:
        ValueError: mesh axes do not divide a dimension, or `to_spec` rejects the axes.
    """

    def spec_of(path, leaf, axes):
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        try:
            spec = to_spec(axes, rules)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
        if len(axes) != len(leaf.shape):
            raise ValueError(
                f"parameter {name}{leaf.shape} has {len(leaf.shape)} dimensions but "
                f"{len(axes)} logical axes {axes}; give a name or None for each dimension"
            )
        parts = zip(leaf.shape, axes, axes_by_dim(spec), strict=True)
        for dim, (size, logical, part) in enumerate(parts):
            where = f"dimension {dim} of {name}, shape {leaf.shape}"
            _check_divides(mesh, part, size, logical, where)
        return spec

    return jax.tree_util.tree_map_with_path(spec_of, abstract, logical_axes)


def split_first_dims(specs: Any, abstract: Any, layers: Any, mesh: AnyMesh) -> Any:
    """Split the first dim, instead of a later one, over axes that only divide state at rest.

    XLA transposes an array that is gathered along a later dim, and its gradient.

    Args:
        specs: PartitionSpec of every parameter.
        abstract: the same tree of arrays or ShapeDtypeStructs.
        layers: the same tree of bools: whether the first dim counts a stack's layers. Then the next
            one is split.
        mesh: mesh that the specs are for.

    Returns:
        The new tree of PartitionSpecs. A parameter stays as it is if its first dim is split over
        automatic axes, such as `model`, or if the axes do not divide it.
    """

    def split_first(spec: PartitionSpec, leaf: Any, is_layers: bool) -> PartitionSpec:
        first = int(is_layers)
        parts = axes_by_dim(spec, len(leaf.shape))
        later = parts[first + 1 :]
        moved = tuple(a for part in later for a in part if a in REPLICA_AXES and mesh.shape[a] > 1)
        if not moved:
            return spec
        manual = tuple(a for a in parts[first] if a in REPLICA_AXES)
        automatic = tuple(a for a in parts[first] if a not in REPLICA_AXES)
        axes = (*manual, *moved, *automatic)
        is_automatic = any(mesh.shape[a] > 1 for a in automatic)
        if is_automatic or leaf.shape[first] % math.prod(mesh.shape[a] for a in axes):
            return spec
        return spec_of((*parts[:first], axes, *without(later, moved)))

    return jax.tree.map(split_first, specs, abstract, layers, is_leaf=is_spec)


def shardings(mesh: AnyMesh, specs: Any) -> Any:
    """Return the tree of PartitionSpecs as NamedShardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def unused_axes(specs: Any, rules: Rules, mesh: AnyMesh) -> list[str]:
    """Return mesh axes of more than one device that neither parameters nor the batch use."""
    used = set(rules["batch"])
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        used |= axes_of(spec)
    return [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]


def _check_divides(mesh, axes, size: int, logical: str | None, where: str) -> None:
    count = math.prod(mesh.shape[axis] for axis in axes)
    if size % count:
        shown = {axis: mesh.shape[axis] for axis in axes if mesh.shape[axis] > 1}
        # With a mode of the section `tensor`, the axis `model` is only a part of mesh.model.
        has_mode = any(mesh.shape.get(axis, 1) > 1 for axis in FACTORS if axis not in AXES)
        of_mesh = {axis for axis in AXES if not (has_mode and axis in FACTORS)}
        keys = {a: f"mesh.{a}" if a in of_mesh else f"tensor.mode's {a}" for a in shown}
        factors = " × ".join(f"{keys[axis]}={size}" for axis, size in shown.items())
        choices = ", ".join(str(n) for n in range(1, min(size, 128) + 1) if size % n == 0)
        raise ValueError(f"{factors} must divide {logical}={size} ({where}); choose from {choices}")
