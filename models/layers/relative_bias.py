"""A learned bias of attention's logits that depends on the distance of query and key.

Distances are sorted into buckets: one each for small distances, then logarithmic ones. Half of the
buckets are for keys after the query, unless attention is causal.

B batch, T seq, S key seq, N heads, R buckets.

Source: Raffel et al. 2019 (arXiv:1910.10683), section 2.1.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """The bias of a self-attention, by the positions of queries and keys.

    Attributes:
        table_RN: bias for each bucket of distances and each head.
        is_causal: whether all buckets are for keys before the query; otherwise half of them are for
            keys after it.
        max_distance: this distance and all larger ones share one bucket.
    """

    table_RN: jax.Array
    is_causal: bool = dataclasses.field(metadata={"static": True})
    max_distance: int = dataclasses.field(metadata={"static": True})

    def whole(self, length: int) -> jax.Array:
        """Return the bias of the logits of T queries and T keys of a whole row, `[1, N, T, T]`."""
        distances = np.arange(-(length - 1), length)  # key position minus query position
        by_distance_NR = self.table_RN[self._buckets(distances)].T
        if length == 1:  # the rows below would be empty
            return by_distance_NR[None, :, None]
        # Query q needs the distances -q .. T-1-q, a window that moves left by one with each q.
        # Repeat the line of 2T-1 distances, drop its first T-1, and cut the rest into rows that are
        # one shorter than the line, so that each begins one distance further left. For T = 3:
        #     -2 -1 [0 1 2 -2] [-1 0 1 2] [-2 -1 0 1] 2      ->  [0 1 2], [-1 0 1], [-2 -1 0]
        num = len(distances)
        lines = jnp.tile(by_distance_NR, (1, length))[:, length - 1 :][:, : length * (num - 1)]
        return lines.reshape(-1, length, num - 1)[None, :, :, :length]

    def between(self, queries_T: jax.Array, keys_S: jax.Array) -> jax.Array:
        """Return the bias of the logits of queries and keys at these positions, `[1, N, T, S]`."""
        longest = self.max_distance
        buckets = self._buckets(np.arange(-longest, longest + 1))
        distances_TS = jnp.clip(keys_S[None] - queries_T[:, None], -longest, longest)
        bias_TSN = self.table_RN[jnp.asarray(buckets)[distances_TS + longest]]
        return jnp.moveaxis(bias_TSN, -1, 0)[None]

    def at(self, distances_BTS: jax.Array) -> jax.Array:
        """Return the bias of the logits of T queries of a decoder and S keys, `[B, N, T, S]`.

        Args:
            distances_BTS: int32, how far the keys are before the queries.
        """
        buckets = jnp.asarray(self._buckets(-np.arange(self.max_distance + 1)))
        bias_BTSN = self.table_RN[buckets[jnp.minimum(distances_BTS, self.max_distance)]]
        return jnp.moveaxis(bias_BTSN, -1, 1)

    def _buckets(self, distances: np.ndarray) -> np.ndarray:
        return _buckets(distances, self.table_RN.shape[0], self.is_causal, self.max_distance)


def _buckets(
    distances: np.ndarray, num_buckets: int, is_causal: bool, max_distance: int
) -> np.ndarray:
    """Return the bucket of each distance: one each for small distances, then logarithmic ones."""
    first = np.zeros_like(distances)
    if is_causal:
        distances = np.maximum(-distances, 0)
    else:
        num_buckets //= 2
        first = np.where(distances > 0, num_buckets, 0)
        distances = np.abs(distances)
    exact = num_buckets // 2
    # Use float32, like the training of published checkpoints: a boundary may be a whole number.
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
    ratio /= np.float32(math.log(max_distance / exact))
    large = exact + (ratio * np.float32(num_buckets - exact)).astype(np.int64)
    return first + np.where(distances < exact, distances, np.minimum(large, num_buckets - 1))
