"""Sends arrays around rings of devices.

The devices of a mesh axis form one ring, or several with the same number of devices. Neighbours in
a ring are then as far apart on the axis as there are rings, because neighbours on the axis have the
fastest links, which the exchange of heads needs more:

    axis of 8 devices, ring_size 4      rings [0 2 4 6] and [1 3 5 7]
"""

from typing import Any

import jax
import jax.numpy as jnp

from sharding import hardware


def ring_index(axis: str, ring_size: int) -> jax.Array:
    """Return int32[], the index of this device in its ring."""
    return jax.lax.axis_index(axis) // (jax.lax.axis_size(axis) // ring_size)


def shift(tree: Any, axis: str, *, distance: int, ring_size: int) -> Any:
    """Send arrays `distance` devices further around the ring; return the arrays that arrive.

    Some pipeline stages may run this while others don't. On GPUs it is a permutation, which pairs
    of devices carry out. On CPUs a permutation waits for all devices of the program, so there it is
    an all-to-all, which waits for the devices of `axis` only. All parts that a device sends are
    zero, except for the one to its neighbour.

    Args:
        tree: arrays.
        axis: manual mesh axis.
        distance: from 1 to ring_size - 1.
        ring_size: devices of a ring; it divides the size of the axis.
    """
    num_rings = jax.lax.axis_size(axis) // ring_size
    rings = [[ring + num_rings * index for index in range(ring_size)] for ring in range(num_rings)]
    if not hardware.current().runs_on_cpu:
        pairs = [(ring[i - distance], device) for ring in rings for i, device in enumerate(ring)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)
    index = ring_index(axis, ring_size)

    def exchange(x: jax.Array) -> jax.Array:
        parts = jnp.zeros((ring_size, *x.shape), x.dtype)
        parts = parts.at[(index + distance) % ring_size].set(x)
        parts = jax.lax.all_to_all(parts, axis, 0, 0, axis_index_groups=rings)
        return parts[(index - distance) % ring_size]

    return jax.tree.map(exchange, tree)
