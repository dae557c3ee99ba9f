"""Packs activations of different shapes into one common type, which every stage can send.

All stages run one program, so a send has the same type on every stage. If all stacks of a model
take activations of one type, that type is sent unchanged. Otherwise activations are packed: one
flat array per dtype, large enough for every stack, with zeros at the end. For two stacks:

    stack 1  {"x": float32[2, 4]}                          8 float32
    stack 2  {"x": float32[2, 2], "mask": bfloat16[3]}     4 float32, 3 bfloat16
    packed   {"float32": float32[8], "bfloat16": bfloat16[3]}
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any


class PackedActivations:
    """Packs activations of several types into one type, and unpacks them.

    Args:
        types: types of all activations that are sent, each a tree of ShapeDtypeStructs.

    Attributes:
        type: common type that is sent, a tree of ShapeDtypeStructs.
        are_alike: whether all activations have the same type and are sent unchanged.
    """

    def __init__(self, types: Sequence[Tree]):
        self.are_alike = all(other == types[0] for other in types)
        if self.are_alike:
            self.type = types[0]
            return
        sizes = [_sizes(leaves) for leaves in map(jax.tree.leaves, types)]
        dtypes = sorted({dtype for each in sizes for dtype in each})
        self.type: Tree = {
            dtype: jax.ShapeDtypeStruct((max(each[dtype] for each in sizes),), dtype)
            for dtype in dtypes
        }

    def pack(self, x: Tree) -> Tree:
        """Convert activations of one of the types to the common type."""
        if self.are_alike:
            return x
        leaves = jax.tree.leaves(x)

        def flat(room: jax.ShapeDtypeStruct) -> jax.Array:
            parts = [leaf.reshape(-1) for leaf in leaves if leaf.dtype == room.dtype]
            num_zeros = room.size - sum(part.size for part in parts)
            return _whole(jnp.concatenate([*parts, jnp.zeros(num_zeros, room.dtype)]))

        return jax.tree.map(flat, self.type)

    def unpack(self, packed: Tree, like: Tree) -> Tree:
        """Convert a packed value back to activations of the type `like`.

        If `packed` was packed from another type, the result is meaningless.
        """
        if self.are_alike:
            return packed
        starts: dict[str, int] = collections.defaultdict(int)

        def take(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name = leaf.dtype.name
            start = starts[name]
            starts[name] = starts[name] + math.prod(leaf.shape)
            return _whole(packed[name][start : starts[name]].reshape(leaf.shape))

        return jax.tree.map(take, like)


def _whole(x: jax.Array) -> jax.Array:
    """Replicate `x` over all automatic axes of the mesh.

    Only stages with layers of a stack execute its branch. A reshape of an array that is sharded
    over automatic axes could make XLA insert communication there, which would wait for devices that
    never take part.
    """
    replicated = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return jax.lax.with_sharding_constraint(x, replicated)


def _sizes(leaves: Sequence[jax.ShapeDtypeStruct]) -> dict[str, int]:
    sizes: dict[str, int] = collections.defaultdict(int)
    for leaf in leaves:
        sizes[leaf.dtype.name] += math.prod(leaf.shape)
    return sizes
