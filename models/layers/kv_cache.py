"""The keys and values of earlier tokens, which attention reads while a text is generated.

A model's blocks are the same as in training. Within one of these contexts, `attend`
(models/layers/attention.py) also fills or reads caches, one for each attention of the model in the
order in which it runs:

    filling   a pass over whole prompts:  kernels as in training; their keys and values are kept
    reading   a pass over the next tokens:  their keys and values are added, and they see the rest

A cache has room for S tokens and is a ring: position p is in slot p mod S. Attention with a sliding
window of W tokens or in chunks of W needs at most W slots; other attention needs a slot for each
token. Rows have different lengths, and each counts its own positions from 0.

The next tokens of a row may be drafts, of which the last ones are taken back: the row goes on from
an earlier position, and its next tokens replace them. Caches have spare slots for drafts, so that
they replace no key that is still needed.

Latent attention (latent_attention.py) keeps arrays from which both keys and values follow, as keys
without values.

Cross-attention, which is not causal, has a fixed cache: `filling` keeps the keys and values of the
encoder's output, `reading` adds none. The keys and values that it gets are not used, so the
compiler drops their computation. The encoder runs outside of these contexts.

B batch, T query seq, S slots, N heads, K key-value heads, Q = N / K × T, H head_dim.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from models.layers.activations import soft_capped
from models.layers.masks import Operands, Options
from sharding.context_values import bound
from sharding.logical import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of one attention.

    Attributes:
        k_BKSH: keys, after rotary embeddings.
        v_BKSH: values; None if the keys are the values too.
        is_visible_BS: bool, which keys of cross-attention the row sees; None for self-attention.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array | None
    is_visible_BS: jax.Array | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether this is the cache of cross-attention, which no new token changes."""
        return self.is_visible_BS is not None


class _Filling:
    """Keeps the keys and values of prompts.

    Args:
        lengths_B: int32, number of tokens of each row; the rest of the row is padding.
        num_slots: slots of a cache without a window.
        num_spare: how many of them are for drafts.
    """

    def __init__(self, lengths_B: jax.Array, num_slots: int, num_spare: int):
        self._lengths_B = lengths_B
        self._num_slots = num_slots
        self._num_spare = num_spare
        self.caches: list[KVCache] = []

    def keep(self, k_BTKH: jax.Array, v_BTKH: jax.Array | None, reach: int | None) -> None:
        """Keep the newest keys and values of each row; None if the keys are the values too."""
        num_slots = self._num_slots
        if reach is not None:
            num_slots = min(num_slots, reach + self._num_spare)
        slots_S = jnp.arange(num_slots, dtype=jnp.int32)
        last_B1 = self._lengths_B[:, None] - 1
        # Empty slots get any token; `reading` masks them.
        positions_BS = jnp.maximum(_position_in(slots_S, last_B1, num_slots), 0)

        def in_slots(x_BTKH: jax.Array) -> jax.Array:
            return _by_head(jnp.take_along_axis(x_BTKH, positions_BS[..., None, None], axis=1))

        v_BKSH = None if v_BTKH is None else in_slots(v_BTKH)
        self.caches.append(KVCache(k_BKSH=in_slots(k_BTKH), v_BKSH=v_BKSH))

    def keep_across(self, operands: Operands) -> None:
        """Keep all keys and values of cross-attention."""
        is_visible_BS = jnp.ones(operands.k.shape[:2], bool)
        if operands.segments is not None:
            is_visible_BS = operands.segments[0][:, -1:] == operands.segments[1]
        k_BKSH = _by_head(operands.k)
        v_BKSH = _by_head(operands.v)
        self.caches.append(KVCache(k_BKSH=k_BKSH, v_BKSH=v_BKSH, is_visible_BS=is_visible_BS))


class _Reading:
    """Adds the keys and values of the next tokens, and lets each see those before it.

    Args:
        caches: as from `filling`.
        positions_BT: int32, positions of the tokens in each row, one after another.
    """

    def __init__(self, caches: Sequence[KVCache], positions_BT: jax.Array):
        self._old = caches
        self._positions_BT = positions_BT
        self.caches: list[KVCache] = []

    def key_distances(self) -> jax.Array:
        """Return int32[B, T, S]: how far the keys of the next cache are before each query.

        A key after the query has a distance beyond its position, or beyond the window.
        """
        num_slots = self._old[len(self.caches)].k_BKSH.shape[2]
        slots_S = jnp.arange(num_slots, dtype=jnp.int32)
        return (self._positions_BT[:, :, None] - slots_S) % num_slots

    def read(self, operands: Operands, options: Options, sinks_N: jax.Array | None) -> jax.Array:
        """Return the attention of the tokens, `[B, T, N, H]`."""
        distances_BTS = self.key_distances()
        old = self._old[len(self.caches)]
        num_slots = old.k_BKSH.shape[2]
        rows_B1 = jnp.arange(len(self._positions_BT))[:, None]
        slots_BT = self._positions_BT % num_slots

        def added(old_BKSH: jax.Array, x_BTKH: jax.Array) -> jax.Array:
            at = old_BKSH.at[rows_B1, :, slots_BT]
            return at.set(x_BTKH, mode="promise_in_bounds", unique_indices=True)

        v_BKSH = None if old.v_BKSH is None else added(old.v_BKSH, operands.v)
        cache = KVCache(k_BKSH=added(old.k_BKSH, operands.k), v_BKSH=v_BKSH)
        self.caches.append(cache)
        is_visible_BTS = distances_BTS <= self._positions_BT[:, :, None]
        if options.mask.window is not None:
            is_visible_BTS &= distances_BTS < options.mask.window
        if options.chunk is not None:
            is_visible_BTS &= distances_BTS <= self._positions_BT[:, :, None] % options.chunk
        return _attend_to(cache, operands, is_visible_BTS, options, sinks_N)

    def read_across(
        self, operands: Operands, options: Options, sinks_N: jax.Array | None
    ) -> jax.Array:
        """Return the cross-attention of the tokens, `[B, T, N, H]`."""
        cache = self._old[len(self.caches)]
        self.caches.append(cache)
        assert cache.is_visible_BS is not None
        operands = dataclasses.replace(operands, bias=None)
        return _attend_to(cache, operands, cache.is_visible_BS[:, None], options, sinks_N)


_current: contextvars.ContextVar[_Filling | _Reading | None] = contextvars.ContextVar(
    "kv_caches", default=None
)


@contextlib.contextmanager
def filling(lengths_B: jax.Array, num_slots: int, num_spare: int) -> Iterator[list[KVCache]]:
    """Keep the keys and values of all attention that is traced in this context.

    Args:
        lengths_B: int32[B], number of tokens of each row; padding follows them.
        num_slots: number of tokens that a row may have in the end, drafts included.
        num_spare: most drafts of a row at the same time; 0 without drafts.

    Yields:
        A list that gets a cache for each attention.
    """
    with bound(_current, _Filling(lengths_B, num_slots, num_spare)) as current:
        yield current.caches


@contextlib.contextmanager
def reading(caches: Sequence[KVCache], positions_BT: jax.Array) -> Iterator[list[KVCache]]:
    """Let all attention that is traced in this context see the tokens in caches.

    The model gets the next T tokens of each row.

    Args:
        caches: as from `filling` or `reading`.
        positions_BT: int32[B, T], positions of the tokens in each row, one after another.

    Yields:
        A list that gets a cache for each attention, with the tokens added.
    """
    with bound(_current, _Reading(caches, positions_BT)) as current:
        yield current.caches


def is_reading() -> bool:
    """Return whether attention that is traced now adds to caches and reads them."""
    return isinstance(_current.get(), _Reading)


def key_distances() -> jax.Array | None:
    """Return how far the keys of the next self-attention are before its queries, int32[B, T, S].

    For a bias that depends on distances, in `reading`; None for a pass over whole rows. A slot that
    is still empty has a distance too; its key is not seen.
    """
    current = _current.get()
    return current.key_distances() if isinstance(current, _Reading) else None


def attend_to_cache(
    operands: Operands,
    options: Options,
    cached_BSKH: jax.Array | None,
    sinks_N: jax.Array | None,
) -> jax.Array | None:
    """Fill or read a cache of the current context.

    Args:
        operands: self-attention with caches has no segments; in `reading`, the dim S of a bias are
            the slots of the cache.
        options: not causal for cross-attention.
        cached_BSKH: what `filling` keeps instead of keys and values, if given.
        sinks_N: as for `models.layers.attention.attend`.

    Returns:
        In `reading`, the attention to the tokens in the cache, `[B, T, N, H]`; otherwise None,
        because attention needs a kernel.
    """
    current = _current.get()
    if isinstance(current, _Reading):
        read = current.read if options.mask.is_causal else current.read_across
        return read(operands, options, sinks_N)
    if isinstance(current, _Filling):
        if options.mask.is_causal:
            kv = (operands.k, operands.v) if cached_BSKH is None else (cached_BSKH, None)
            current.keep(*kv, options.mask.window or options.chunk)
        else:
            current.keep_across(operands)
    return None


def _position_in(slots_S: jax.Array, last_B1: jax.Array, num_slots: int) -> jax.Array:
    """Return int32[B, S]: the newest position up to `last` in each slot; negative if none is."""
    return last_B1 - (last_B1 - slots_S) % num_slots


def _by_head(x_BSKH: jax.Array) -> jax.Array:
    return constrain(x_BSKH.swapaxes(1, 2), "batch", "kv_heads", None, "head_dim")


def _attend_to(
    cache: KVCache,
    operands: Operands,
    is_visible_BTS: jax.Array,
    options: Options,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Return the attention of a few queries per row, `[B, T, N, H]`."""
    q_BTNH = operands.q
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = cache.k_BKSH.shape[1]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    # XLA compiles products of matrices best, so all queries of a key-value head become one matrix.
    shape = batch, num_kv_heads, -1, head_dim
    q_BKQH = q_BTNH.swapaxes(1, 2).reshape(shape)
    logits_BKQS = options.scale * jnp.einsum(
        "BKQH,BKSH->BKQS", q_BKQH, cache.k_BKSH, preferred_element_type=wide
    )
    logits_BKQS = soft_capped(logits_BKQS, options.softcap)
    if operands.bias is not None:
        logits_BKQS += operands.bias.reshape(-1, *logits_BKQS.shape[1:]).astype(wide)
    is_visible_B1QS = jnp.tile(is_visible_BTS, (1, num_heads // num_kv_heads, 1))[:, None]
    logits_BKQS = jnp.where(is_visible_B1QS, logits_BKQS, -jnp.inf)
    if sinks_N is None:
        weights_BKQS = jax.nn.softmax(logits_BKQS, axis=-1)
    else:
        sinks_BKQ1 = jnp.repeat(sinks_N.reshape(1, num_kv_heads, -1, 1), length, axis=2)
        sinks_BKQ1 = jnp.broadcast_to(sinks_BKQ1, (*logits_BKQS.shape[:-1], 1)).astype(wide)
        with_sinks = jnp.concatenate((logits_BKQS, sinks_BKQ1), axis=-1)
        weights_BKQS = jax.nn.softmax(with_sinks, axis=-1)[..., :-1]
    weights_BKQS = weights_BKQS.astype(q_BTNH.dtype)
    v_BKSH = cache.k_BKSH if cache.v_BKSH is None else cache.v_BKSH
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", weights_BKQS, v_BKSH)
    return y_BKQH.reshape(batch, num_heads, length, -1).swapaxes(1, 2)
