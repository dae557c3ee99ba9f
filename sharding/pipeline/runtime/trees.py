"""Small operations on trees of arrays, and on buffers with a leading slot dimension."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


class Flag:
    """A boolean property of every chunk, looked up for the chunks of this device.

    If the property has the same value everywhere, it is resolved during tracing and no `lax.cond`
    is emitted.

    Args:
        table: `table[stage][chunk]`, known during tracing.
        stage_index: int32[], this device's stage.
    """

    def __init__(self, table: Sequence[Sequence[bool]], stage_index: jax.Array):
        values = np.array(table)
        self._known = bool(values.flat[0]) if (values == values.flat[0]).all() else None
        self._here = jnp.asarray(values)[stage_index]

    def choose(
        self, chunk: jax.Array, then: Callable[[], Tree], otherwise: Callable[[], Tree]
    ) -> Tree:
        """Return then() if the flag is set for the chunk, else otherwise()."""
        return branch(self._known, self._here[chunk], then, otherwise)


def branch(
    known: bool | None,
    predicate: jax.Array,
    then: Callable[[], Tree],
    otherwise: Callable[[], Tree],
) -> Tree:
    """Apply `lax.cond`, or only the branch that is always taken if that is known during tracing.

    Args:
        known: the value of the predicate if it is known during tracing, else None.
        predicate: bool[], the value at run time.
        then: called if the predicate is true.
        otherwise: called if the predicate is false.
    """
    if known is not None:
        return then() if known else otherwise()
    return jax.lax.cond(predicate, then, otherwise)


def zeros(tree: Tree, *leading: int) -> Tree:
    """Return zeros of these shapes and dtypes, with additional `leading` dims."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), tree)


def wide(tree: Tree, *leading: int) -> Tree:
    """Return ShapeDtypeStructs with floats widened to at least float32 and `leading` dims added."""

    def shape(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        dtype = jnp.promote_types(x.dtype, jnp.float32) if is_float else x.dtype
        return jax.ShapeDtypeStruct((*leading, *x.shape), dtype)

    return jax.tree.map(shape, tree)


def add(total: Tree, tree: Tree) -> Tree:
    """Return `total + tree` in the dtypes of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, tree)


def where(predicate: jax.Array, then: Tree, otherwise: Tree) -> Tree:
    """Select one of two trees, leaf by leaf, with `jnp.where`."""
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), then, otherwise)


def read(buffers: Tree, slot: jax.Array) -> Tree:
    """Return the contents of a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), buffers)


def write(buffers: Tree, slot: jax.Array, value: Tree) -> Tree:
    """Return the buffers with `value` written to a slot."""
    return jax.tree.map(
        lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, slot, 0), buffers, value
    )
