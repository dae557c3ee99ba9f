"""Dropout whose masks depend neither on the mesh nor on the division into microbatches.

Flax's `Dropout` draws the masks of a batch from one key, so they would depend on both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sharding.ops.sequence import draw_tokens


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, site: int = 0) -> jax.Array:
    """Set elements of `x` to zero at random, and scale all others by 1 / (1 - rate).

    Each example has its own key, so its mask depends neither on the mesh nor on how the batch is
    divided into microbatches.

    Args:
        x: float[B, ...]; with three dims or more, the second counts tokens.
        rate: probability that an element is set to zero, in [0, 1).
        keys: key[B], one per example; None disables dropout.
        site: number of this dropout among those that use the same `keys`, such as 0 and 1 for the
            two in a block. It must be unique, so that their masks differ.
    """
    if keys is None or rate == 0.0:
        return x

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, shape)

    def keep_of(key: jax.Array) -> jax.Array:
        if x.ndim < 3:
            return draw(key, x.shape[1:])
        return draw_tokens(partial(draw, key), x.shape[1:])

    keep = jax.vmap(keep_of)(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def drop_path(x: jax.Array, rate: Any, keys: jax.Array | None, site: int = 0) -> jax.Array:
    """Set whole examples of `x` to zero at random, and scale all others by 1 / (1 - rate).

    Args:
        x: float[B, ...], a residual branch.
        rate: probability that an example is set to zero, in [0, 1): a number or float[].
        keys: key[B], one per example; None disables it.
        site: as for `dropout`, in the same numbering.

    Source: Huang et al. 2016 (arXiv:1603.09382), applied to each example independently.
    """
    if keys is None or (isinstance(rate, float) and rate == 0.0):
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate))(
        keys
    )
    scaled = (x / (1.0 - rate)).astype(x.dtype)
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), scaled, jnp.zeros((), x.dtype))
