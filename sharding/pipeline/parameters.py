"""Parameters on their way into a step, and gradients on their way out of it.

Inside the step `pipeline`, `data` and `fsdp` are handled by hand: what fsdp splits is put together
before use, and gradients are summed over `data` and `fsdp` once, when all microbatches are done.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from sharding.collectives import psum
from sharding.rules import axes_of

#: Mesh axes whose communication is written out by hand.
MANUAL_AXES = ("pipeline", "data", "fsdp")

Tree = Any


def check_specs(specs: dict[str, Tree], mesh: Mesh, *, shares_ends: bool) -> None:
    """Refuses layouts for which a stage would compute with a part of a parameter.

    Args:
      specs: `ends` and `layers`, a PartitionSpec per parameter.
      shares_ends: the stages share the ends, so these may be split over `pipeline`.

    Raises:
      ValueError: names the parameter.
    """
    split = {axis for axis in ("data", "pipeline") if mesh.shape[axis] > 1}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        name = ".".join(str(key.key) for key in path[1:])
        of_layers = path[0].key == "layers"
        first = axes_of(PartitionSpec(*spec[:1]))
        if of_layers and "pipeline" in split - first:
            raise ValueError(
                f"parameter {name} is laid out as {spec}: layers must be split over 'pipeline'; "
                "set rules.layers=pipeline"
            )
        if of_layers and "fsdp" in first and mesh.shape["fsdp"] > 1:
            raise ValueError(
                f"parameter {name} is laid out as {spec}: layers can be split over 'pipeline' "
                "alone; set rules.layers=pipeline, and split another dim over 'fsdp'"
            )
        rest = axes_of(PartitionSpec(*spec[1:])) | (first - {"pipeline"} if of_layers else first)
        rest -= {"pipeline"} if shares_ends and not of_layers else set()
        for axis in sorted(split & rest):
            raise ValueError(
                f"parameter {name} is laid out as {spec}: nothing but layers can be split over "
                f"'pipeline', and nothing but the batch over 'data'; take {axis!r} out of the "
                "rule, or split over 'fsdp' instead"
            )


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def manual_specs(specs: Tree) -> Tree:
    """Returns the specs with the axes alone that are handled by hand."""

    def manual(spec: PartitionSpec) -> PartitionSpec:
        parts = (part if isinstance(part, tuple) else (part,) for part in spec)
        kept = (tuple(axis for axis in part if axis in MANUAL_AXES) or None for part in parts)
        return PartitionSpec(*kept)

    return jax.tree.map(manual, specs, is_leaf=is_spec)


def gather(tree: Tree, specs: Tree, mesh: Mesh, *, skip: int = 0) -> Tree:
    """Returns parameters with their fsdp shards put together.

    Args:
      skip: the number of leading dims that `specs` name and the arrays do not have.
    """

    def whole(x, spec):
        dim = _fsdp_dim(spec, mesh)
        if dim is None:
            return x
        return jax.lax.all_gather(x, "fsdp", axis=dim - skip, tiled=True)

    return jax.tree.map(whole, tree, specs)


def reduce(grads: Tree, specs: Tree, mesh: Mesh, axes: tuple[str, ...]) -> Tree:
    """Returns gradients summed over `axes` and `fsdp`; split over `fsdp` where parameters are.

    A gradient is not summed over axes that split its parameter.
    """

    def summed(grad, spec):
        dim = _fsdp_dim(spec, mesh)
        over = tuple(axis for axis in axes if axis not in axes_of(spec))
        if dim is None:
            return total(grad, mesh, (*over, "fsdp"))
        grad = jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=dim, tiled=True)
        return total(grad, mesh, over)

    return jax.tree.map(summed, grads, specs)


def total(tree: Tree, mesh: Mesh, axes: tuple[str, ...]) -> Tree:
    """Returns `tree` summed over those of the axes that have more than one device."""
    return psum(tree, tuple(axis for axis in axes if mesh.shape[axis] > 1))


def on_shards(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `function` run on every device with its shards of the manual axes."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # Axes of size 1 too: XLA then sees no partly manual mesh unless it has to.
        axis_names={axis for axis, size in mesh.shape.items() if size == 1 or axis in MANUAL_AXES},
        check_vma=False,
    )


def _fsdp_dim(spec: PartitionSpec, mesh: Mesh) -> int | None:
    """Returns the dim that is split over fsdp, if there is one and it is really split."""
    if mesh.shape["fsdp"] == 1:
        return None
    return next((i for i, p in enumerate(spec) if "fsdp" in axes_of(PartitionSpec(p))), None)
