"""Optimizers see the parameters of one layer, although a stack stores all its layers together.

A stack stores a vector of each block as `[slots, D]`, and a matrix as `[slots, D, F]`. An optimizer
that decays arrays of more than one dim, factors its moments or orthogonalizes matrices would take
the vectors for matrices. Here, the optimizer is traced for the parameters of one layer, and the
trace runs for all slots of a stack at once:

    parameters          the optimizer sees      runs
    blocks  [slots, D, F]  [D, F]               vectorized over slots
    table   [V, D]         [V, D]               once
    count   []             []                   once, for all parameters

Its state has a leading dim of slots too, like the parameters that it belongs to. So slots can be
cut, permuted and updated one at a time.

This requires that the update of a parameter depends on no other one, so that layers can be updated
independently: a norm over all parameters would become one over a layer.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from sharding.jaxprs import environment, evaluate, value_of

Tree = Any
Path = tuple[Any, ...]

#: Parameters outside the stacks, and state that belongs to no parameter, such as counts.
_ONCE = ""


def one_layer(params: Tree, stacks: Collection[str]) -> Tree:
    """Return the parameters as an optimizer sees them, as ShapeDtypeStructs.

    Args:
        params: tree of parameters.
        stacks: first keys of parameters with shape `[slots, ...]`, which hold one tensor per slot.
    """

    def view(path: Path, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[path[0].key in stacks :], x.dtype)

    return jax.tree_util.tree_map_with_path(view, params)


def map_state(
    function: Callable[..., Any],
    state: Tree,
    params: Tree,
    *like_params: Tree,
    of_other: Callable[[Any], Any] = lambda leaf: leaf,
) -> Tree:
    """Map a function over an optimizer's state, with one value per parameter.

    A leaf of the state belongs to the parameter whose path is the end of its own path, as in
    `.inner_states["adam"].mu["blocks"]["mlp"]["kernel"]`.

    Args:
        function: called as `function(leaf, *values)` for a leaf that belongs to a parameter.
        state: optimizer's state.
        params: trained parameters; only the paths are read.
        *like_params: trees like `params`, with the values.
        of_other: called as `of_other(leaf)` for every other leaf.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    structure = jax.tree.structure(params)
    values = [structure.flatten_up_to(tree) for tree in like_params]
    values_of = {path: [tree[i] for tree in values] for i, path in enumerate(paths)}

    def mapped(path: Path, leaf: Any) -> Any:
        owner = owner_of(path, values_of)
        return of_other(leaf) if owner is None else function(leaf, *values_of[owner])

    return jax.tree_util.tree_map_with_path(mapped, state)


def owner_of(path: Path, params: Collection[Path]) -> Path | None:
    """Return the path of the parameter that a leaf belongs to; None if it belongs to none."""
    return next((path[i:] for i in range(len(path)) if path[i:] in params), None)


def per_layer(
    optimizer: optax.GradientTransformation, stacks: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of stacked parameters, from an optimizer that sees one layer.

    Args:
        optimizer: optimizer; the update of a parameter must depend on no other parameter.
        stacks: as for `one_layer`.

    Returns:
        A transformation whose `update` takes an additional argument `param_layout`, for matrices.
    """
    wrapped = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return _run(wrapped.init, (params,), params, stacks)

    def update(updates: Tree, state: Tree, params: Tree = None, **others: Any) -> tuple[Tree, Tree]:
        layout = {"param_layout": others["param_layout"]} if "param_layout" in others else {}

        def one(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            return wrapped.update(updates, state, params, **layout)

        return _run(one, (updates, state, params), updates, stacks)

    return optax.GradientTransformationExtraArgs(init, update)


def check_independent(
    optimizer: optax.GradientTransformation, params: Tree, stacks: Collection[str], name: str
) -> None:
    """Reject an optimizer whose update of a parameter depends on another parameter.

    Args:
        optimizer: optimizer that sees the parameters of one layer.
        params: trained parameters, as for `one_layer`.
        stacks: as for `one_layer`.
        name: `optimizer.name`, for the error.

    Raises:
        ValueError: the optimizer needs several parameters at once.
    """
    update = optax.with_extra_args_support(optimizer).update
    views = one_layer(params, stacks)
    state = jax.eval_shape(optimizer.init, views)
    closed, results = jax.make_jaxpr(lambda *args: update(*args), return_shape=True)(
        views, state, views
    )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(views)]
    inputs = _owners((views, state, views), paths)
    outputs = _owners(results, paths)
    for group in dict.fromkeys(outputs):
        _, is_used = dce_jaxpr(closed.jaxpr, [owner == group for owner in outputs])
        read = [owner for owner, used in zip(inputs, is_used, strict=True) if used]
        others = [owner for owner in read if owner is not None and owner != group]
        if others:
            raise ValueError(_dependence(name, group, others[0]))


def _dependence(name: str, group: Path | None, other: Path) -> str:
    updated = "its state" if group is None else f"the update of {_dotted(group)}"
    return (
        f"optimizer.name={name!r}: {updated} depends on another parameter, {_dotted(other)}, but "
        "each layer is updated separately; remove norms over several parameters, and clip with "
        "optimizer.clip_norm instead of optax.clip_by_global_norm"
    )


def _dotted(path: Path) -> str:
    return ".".join(str(getattr(key, "key", key)) for key in path)


def _owners(tree: Tree, paths: Collection[Path]) -> list[Path | None]:
    """Return the path of the parameter that each leaf of a tree belongs to."""
    return [owner_of(path, {*paths}) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _run(
    function: Callable[..., Tree],
    args: Sequence[Tree],
    params: Tree,
    stacks: Collection[str],
) -> Tree:
    """Return `function(*args)`, where the function sees one layer and the arguments are stacked.

    Args:
        function: function of one layer's arrays.
        args: its arguments, with a leading dim of slots in leaves that belong to a stack.
        params: parameters, or a tree like them.
        stacks: as for `one_layer`.
    """
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}

    def groups_of(tree: Tree) -> list[str]:
        owners = _owners(tree, paths)
        return [o[0].key if o is not None and o[0].key in stacks else _ONCE for o in owners]

    leaves, structure = jax.tree.flatten(tuple(args))
    groups = groups_of(tuple(args))
    views = [
        jax.ShapeDtypeStruct(x.shape[group != _ONCE :], x.dtype)
        for x, group in zip(map(jax.numpy.asarray, leaves), groups, strict=True)
    ]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*structure.unflatten(views))
    out_groups = groups_of(shapes)
    results: list[Any] = [None] * len(out_groups)
    for group in dict.fromkeys(out_groups):
        chosen = [i for i, g in enumerate(out_groups) if g == group]
        is_chosen = [g == group for g in out_groups]
        jaxpr, is_used = dce_jaxpr(closed.jaxpr, is_chosen)
        used = [i for i, is_read in enumerate(is_used) if is_read]
        assert all(groups[i] in (group, _ONCE) for i in used)  # see check_independent
        run = _evaluator(closed.replace(jaxpr=jaxpr))
        inputs = [leaves[i] for i in used]
        if group != _ONCE:
            size = next(len(x) for x, g in zip(leaves, groups, strict=True) if g == group)
            in_axes = [0 if groups[i] == group else None for i in used]
            run = jax.vmap(run, in_axes=(in_axes,), axis_size=size)
        for i, value in zip(chosen, run(inputs), strict=True):
            results[i] = value
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _evaluator(closed: ClosedJaxpr) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that evaluates a closed jaxpr."""

    def run(inputs: Sequence[Any]) -> list[Any]:
        env = environment(closed, inputs)
        evaluate(closed.jaxpr.eqns, env)
        return [value_of(v, env) for v in closed.jaxpr.outvars]

    return run
