"""Small operations on trees of arrays, and on buffers with a leading slot dimension."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding.ops.update_if import Condition

Tree = Any


class Flag:
    """A boolean property of every chunk, looked up for the chunks of this device.

    If the property has the same value everywhere, it is resolved during tracing.

    Args:
        table: `table[stage][chunk]`, known during tracing.
        stage_index: int32[], this device's stage.
    """

    def __init__(self, table: Sequence[Sequence[bool]], stage_index: jax.Array):
        values = np.array(table)
        self._known = bool(values.flat[0]) if (values == values.flat[0]).all() else None
        self._here = jnp.asarray(values)[stage_index]

    def at(self, chunk: jax.Array) -> Condition:
        """Return whether the flag is set for the chunk."""
        return Condition(lambda: self._here[chunk], self._known)


def without(tree: Tree, marks: Tree | None) -> Tree:
    """Replace the leaves of a tree that are marked by None.

    Args:
        marks: bool per leaf of the tree; None marks nothing.
    """
    if marks is None:
        return tree
    return jax.tree.map(lambda is_marked, x: None if is_marked else x, marks, tree)


def is_none(x: Any) -> bool:
    """Return whether `x` is None: `jax.tree.map(..., is_leaf=is_none)` then visits Nones too."""
    return x is None


def total_of(tree: Tree) -> jax.Array:
    """Return the sum of the leaves of a tree of scalars."""
    return functools.reduce(operator.add, jax.tree.leaves(tree))


def zeros(tree: Tree, *leading: int) -> Tree:
    """Return zeros of these shapes and dtypes, with additional `leading` dims."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), tree)


def wide_types(tree: Tree, *leading: int) -> Tree:
    """Return ShapeDtypeStructs with floats widened to at least float32 and `leading` dims added."""

    def shape(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        dtype = jnp.promote_types(x.dtype, jnp.float32) if is_float else x.dtype
        return jax.ShapeDtypeStruct((*leading, *x.shape), dtype)

    return jax.tree.map(shape, tree)


def add(total: Tree, tree: Tree) -> Tree:
    """Return `total + tree` in the dtypes of `total`, with None where `total` has None."""

    def added(a: jax.Array | None, b: jax.Array) -> jax.Array | None:
        return None if a is None else a + b.astype(a.dtype)

    return jax.tree.map(added, total, tree, is_leaf=is_none)


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
