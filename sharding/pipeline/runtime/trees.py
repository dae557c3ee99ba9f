"""Small operations on trees of arrays, and on buffers whose leading dim is one of slots."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


class Flag:
    """Something that holds of some of this device's chunks.

    Args:
      table: a bool per stage and chunk, known to the compiler.
      stage: int32[], this device's.
    """

    def __init__(self, table: Sequence[Sequence[bool]], stage: jax.Array):
        values = np.array(table)
        self._known = bool(values.flat[0]) if (values == values.flat[0]).all() else None
        self._here = jnp.asarray(values)[stage]

    def choose(
        self, chunk: jax.Array, then: Callable[[], Tree], otherwise: Callable[[], Tree]
    ) -> Tree:
        """Returns then() if it holds of the chunk, and otherwise() if not."""
        return branch(self._known, self._here[chunk], then, otherwise)


def branch(
    known: bool | None,
    predicate: jax.Array,
    then: Callable[[], Tree],
    otherwise: Callable[[], Tree],
) -> Tree:
    """Returns what `lax.cond` does, or runs nothing but the branch that is always taken.

    Args:
      known: which that is, None if neither.
    """
    if known is not None:
        return then() if known else otherwise()
    return jax.lax.cond(predicate, then, otherwise)


def zeros(tree: Tree, *leading: int) -> Tree:
    """Returns zeros of these shapes and dtypes, with `leading` dims before them."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), tree)


def wide(tree: Tree, *leading: int) -> Tree:
    """Returns ShapeDtypeStructs, floats in float32 or wider, with `leading` dims before."""

    def shape(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        dtype = jnp.promote_types(x.dtype, jnp.float32) if is_float else x.dtype
        return jax.ShapeDtypeStruct((*leading, *x.shape), dtype)

    return jax.tree.map(shape, tree)


def add(total: Tree, tree: Tree) -> Tree:
    """Returns `total + tree` in the dtypes of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, tree)


def where(predicate: jax.Array, then: Tree, otherwise: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), then, otherwise)


def read(buffers: Tree, slot: jax.Array) -> Tree:
    """Returns what lies in a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), buffers)


def write(buffers: Tree, slot: jax.Array, value: Tree) -> Tree:
    """Returns the buffers with `value` in a slot."""
    return jax.tree.map(
        lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, slot, 0), buffers, value
    )
