"""Checks that the arrays of a checkpoint have the names, shapes and dtypes of a run's state."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


def check_same_structure(
    path: Path, saved_tree: Any, abstract_state: Any, may_lack: Collection[str]
) -> Any:
    """Check that a checkpoint matches a state.

    Args:
        saved_tree: checkpoint's arrays, as a pytree whose leaves have a shape and a dtype.
        abstract_state: state, as in `Checkpoints.restore`.
        may_lack: fields that either of them may lack, as in `Checkpoints.restore`.

    Returns:
        `abstract_state`, with None in place of each field that the checkpoint does not have.

    Raises:
        ValueError: other names, shapes or dtypes differ.
    """
    saved = describe(saved_tree)
    wanted = describe(abstract_state)
    differences = [
        f"{name} is {saved.get(name, 'missing')} in the checkpoint and "
        f"{wanted.get(name, 'missing')} in this run"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
        and not (name.partition(".")[0] in may_lack and not (name in saved and name in wanted))
    ]
    if differences:
        more = f" (and {len(differences) - 1} more differ)" if len(differences) > 1 else ""
        raise ValueError(
            f"checkpoint {path} does not match the model: "
            f"{differences[0]}{more}; use the config it was saved with, or another workdir"
        )
    lacking = {name.partition(".")[0] for name in wanted.keys() - saved.keys()}

    def is_lacking(keys: Sequence[Any], _: Any = None) -> bool:
        return leaf_name(keys) in lacking

    return jax.tree_util.tree_map_with_path(
        lambda keys, part: None if is_lacking(keys) else part,
        abstract_state,
        is_leaf=is_lacking,
        is_leaf_takes_path=True,
    )


def leaf_name(path: Sequence[Any]) -> str:
    """Return the name of an array in a checkpoint, such as `params.layer.kernel`.

    Args:
        path: keys of a leaf, as in `jax.tree_util.tree_flatten_with_path`.
    """
    return ".".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def describe(tree: Any) -> dict[str, str]:
    """Return dtypes and shapes by name, as in `{'params.layer.kernel': 'float32[4, 8]'}`.

    Args:
        tree: pytree whose leaves have a shape and a dtype; other leaves are ignored.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        leaf_name(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }
