"""Frozen parameters: parameters that training does not change (`optimizer.frozen`, `lora`)."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from models.adapters import is_adapter
from models.functions import ModelFunctions
from models.layers.lora import LoraConfig

Tree = Any


def frozen_params(params: Tree, patterns: Sequence[str], lora: LoraConfig) -> Tree | None:
    """Return a bool per parameter, whether it is frozen, or None if all are trained.

    With adapters, all other parameters are frozen, except for those in `lora.also_trained`.

    Args:
        params: tree of parameters.
        patterns: `optimizer.frozen`: patterns of dotted names, such as "token_embedding" or
            "encoder.*". `*` matches dots too.
        lora: section `lora`.

    Raises:
        ValueError: a pattern matches no parameter, or there is nothing to train.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [[str(key.key) for key in path] for path, _ in leaves]
    names = [".".join(path) for path in paths]
    are_frozen = _matches(names, patterns, "optimizer.frozen")
    if lora.rank is not None:
        also_trained = _matches(names, lora.also_trained, "lora.also_trained")
        are_frozen = [
            frozen or not (trained or is_adapter(path))
            for frozen, trained, path in zip(are_frozen, also_trained, paths, strict=True)
        ]
    if all(are_frozen):
        raise ValueError(
            f"optimizer.frozen={','.join(patterns)} matches all {len(names)} parameters, so there "
            "is nothing to train; remove some patterns"
        )
    return jax.tree.unflatten(structure, are_frozen) if any(are_frozen) else None


def trained_params(params: Tree, frozen: Tree | None) -> Tree:
    """Replace frozen parameters, or the corresponding leaves of a similar tree, by None.

    Args:
        params: parameters, or a tree like them.
        frozen: bool per parameter; None: no parameter is frozen.
    """
    if frozen is None:
        return params
    return jax.tree.map(lambda is_frozen, x: None if is_frozen else x, frozen, params)


def _matches(names: Sequence[str], patterns: Sequence[str], key: str) -> list[bool]:
    """Return whether a pattern matches, for each name; each pattern must match one."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            near = near or sorted({name.partition(".")[0] for name in names})
            raise ValueError(
                f"{key}: {pattern!r} matches no parameter; the nearest are "
                f"{', '.join(near)} (`python -m checkpoint show` lists all names, after `params.`)"
            )
    return [any(fnmatchcase(name, pattern) for pattern in patterns) for name in names]


def with_frozen_params(functions: ModelFunctions, frozen: Tree) -> ModelFunctions:
    """Stop the gradients of frozen parameters in all functions of a model, and mark them.

    Args:
        functions: model's functions.
        frozen: bool per parameter.
    """
    marks = functions.split(frozen)

    def stop_gradients(params: Tree, marks: Tree) -> Tree:
        def stop(x, is_frozen):
            return jax.lax.stop_gradient(x) if is_frozen else x

        return jax.tree.map(stop, params, marks)

    def freeze(function: Callable, marks: Tree) -> Callable:
        def run(params, *args, **named_args):
            return function(stop_gradients(params, marks), *args, **named_args)

        return run

    def freeze_non_stack(function: Callable) -> Callable:
        return freeze(function, marks["non_stack"])

    return dataclasses.replace(
        functions,
        embed=freeze_non_stack(functions.embed),
        blocks={
            stack: freeze(block, marks["stacks"][stack])
            for stack, block in functions.blocks.items()
        },
        before={stack: freeze_non_stack(before) for stack, before in functions.before.items()},
        head=freeze_non_stack(functions.head),
        frozen=marks,
    )
