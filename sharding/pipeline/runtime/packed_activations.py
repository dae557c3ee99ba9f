"""Activations whose shapes change from stack to stack, in the one form in which they travel.

All stages run one program, so what they send each other has one type. Where a model's stacks take
activations of one type, it is that type. Elsewhere it is a parcel: for each dtype one flat array
with room for the most that any stack takes, of which the rest is zeros.
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
    """What is sent in place of activations of several types.

    Args:
      types: trees of ShapeDtypeStructs, of all activations that are sent.

    Attributes:
      type: of what is sent, the same for all.
      are_alike: whether all activations are of one type, so that they are sent as they are.
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
        """Returns activations of one of the types as what is sent."""
        if self.are_alike:
            return x
        leaves = jax.tree.leaves(x)

        def flat(room: jax.ShapeDtypeStruct) -> jax.Array:
            parts = [leaf.reshape(-1) for leaf in leaves if leaf.dtype == room.dtype]
            rest = room.size - sum(part.size for part in parts)
            return _whole(jnp.concatenate([*parts, jnp.zeros(rest, room.dtype)]))

        return jax.tree.map(flat, self.type)

    def unpack(self, parcel: Tree, like: Tree) -> Tree:
        """Returns what was packed, of the type `like`; of another it is numbers without a sense."""
        if self.are_alike:
            return parcel
        starts: dict[str, int] = collections.defaultdict(int)

        def take(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name = leaf.dtype.name
            start, starts[name] = starts[name], starts[name] + math.prod(leaf.shape)
            return _whole(parcel[name][start : starts[name]].reshape(leaf.shape))

        return jax.tree.map(take, like)


def _whole(x: jax.Array) -> jax.Array:
    """Returns `x` split over no automatic axis of the mesh.

    Where some stages have layers of a stack and others have not, not all devices come to what is
    computed there, and moving parts of an array from device to device could wait for all.
    """
    replicated = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return jax.lax.with_sharding_constraint(x, replicated)


def _sizes(leaves: Sequence[jax.ShapeDtypeStruct]) -> dict[str, int]:
    sizes: dict[str, int] = collections.defaultdict(int)
    for leaf in leaves:
        sizes[leaf.dtype.name] += math.prod(leaf.shape)
    return sizes
