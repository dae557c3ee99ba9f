"""Chooses the next token of each row from its logits.

    logits ── repetition penalty ── banned tokens ──┬── temperature 0: the most likely token
                                                    │
                temperature ── top-k ── top-p ── min-p ── draw

The order is the same as in `transformers.generate`. A row's random numbers depend on the seed, on
the number of the row in the request, and on the position of the token, so neither the mesh nor the
other rows change them.

B batch, V vocab.

Source: top-k: Fan et al. 2018 (arXiv:1805.04833); top-p: Holtzman et al. 2019 (arXiv:1904.09751);
min-p: Nguyen et al. 2024 (arXiv:2407.01082); repetition penalty: Keskar et al. 2019
(arXiv:1909.05858).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fields.numbers import shown

#: Temperatures and penalties beyond these would make logits infinite.
_LEAST = 1e-5
_MOST = 100_000
_MOST_TOKENS = 2**31 - 1  # largest int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: draw from this many of the most likely tokens; None: from all.
        top_p: draw from the fewest most likely tokens whose probabilities sum to at least this.
        min_p: draw from tokens with at least this many times the highest probability.
        repetition_penalty: divides the positive logits of tokens that the row already has, and
            multiplies the negative ones.
        banned: ids of tokens that are never chosen.
        seed: seed of the random numbers.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        t = self.temperature
        for name, is_valid, rule in (
            ("temperature", t == 0 or _LEAST <= t <= _MOST, f"0, or from {_LEAST} to {_MOST:,}"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                _LEAST <= self.repetition_penalty <= _MOST,
                f"from {_LEAST} to {_MOST:,}",
            ),
            ("seed", 0 <= self.seed < 2**32, "in [0, 2**32)"),
        ):
            if not is_valid:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be {rule}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    def check_vocab(self, vocab_size: int) -> None:
        """Check the settings against a model's vocabulary.

        Raises:
            ValueError: a banned token is not in it, or all of its tokens are banned.
        """
        for token in self.banned:
            if not 0 <= token < vocab_size:
                raise ValueError(f"banned={token} must be in [0, {vocab_size})")
        if len({*self.banned}) == vocab_size:
            raise ValueError("banned contains every token; leave at least one")


def choose(
    sampling: Sampling,
    logits_BV: jax.Array,
    seen_BV: jax.Array | None,
    rows_B: jax.Array,
    positions_B: jax.Array,
) -> jax.Array:
    """Return the next token of each row, int32[B].

    Args:
        logits_BV: logits, float32 or wider.
        seen_BV: bool, tokens that the row has; may be None without a repetition penalty.
        rows_B: int32, number of the row in the request.
        positions_B: int32, position that the token will have.
    """
    logits_BV = adjust_logits(sampling, logits_BV, seen_BV)
    if sampling.is_greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    seeds_B = jnp.full(rows_B.shape, sampling.seed, jnp.uint32)
    return _draw(seeds_B, rows_B, positions_B, logits_BV)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSampling:
    """How the tokens of each row are chosen, if the rows differ; without penalties and bans."""

    temperature_B: jax.Array | np.ndarray  # float32
    top_k_B: jax.Array | np.ndarray  # int32; 0 for all tokens
    left_out_B: jax.Array | np.ndarray  # float32, 1 - top-p
    min_p_B: jax.Array | np.ndarray  # float32
    seeds_B: jax.Array | np.ndarray  # uint32
    rows_B: jax.Array | np.ndarray  # int32, number of the row in its request

    @classmethod
    def of(cls, rows: Sequence[tuple[Sampling, int]]) -> "RowSampling":
        """Return the settings of rows, each with its number in its request."""
        each = [sampling for sampling, _ in rows]
        return cls(
            temperature_B=np.array([one.temperature for one in each], np.float32),
            top_k_B=np.array([min(one.top_k or 0, _MOST_TOKENS) for one in each], np.int32),
            left_out_B=np.array([1 - one.top_p for one in each], np.float32),
            min_p_B=np.array([one.min_p for one in each], np.float32),
            seeds_B=np.array([one.seed for one in each], np.uint32),
            rows_B=np.array([number for _, number in rows], np.int32),
        )

    def without_limits_of_others(self, is_active_B: jax.Array) -> "RowSampling":
        """Return the settings, with all tokens allowed in rows that are not active."""
        return dataclasses.replace(
            self,
            top_k_B=jnp.where(is_active_B, self.top_k_B, 0),
            left_out_B=jnp.where(is_active_B, self.left_out_B, 0),
        )


def choose_each(rows: RowSampling, logits_BV: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Return the next token of each row, int32[B], as `choose` does for rows of equal settings.

    Args:
        logits_BV: logits, float32 or wider.
        positions_B: int32, position that the token will have.
    """
    is_greedy_B = rows.temperature_B == 0
    temperature_B1 = jnp.where(is_greedy_B, 1, rows.temperature_B)[:, None]
    warm_BV = logits_BV / temperature_B1.astype(logits_BV.dtype)
    is_top_k_B = rows.top_k_B > 0
    is_top_p_B = rows.left_out_B > 0

    def limited(warm_BV: jax.Array) -> jax.Array:
        of_top_k_BV = _top_k(warm_BV, rows.top_k_B[:, None])
        warm_BV = jnp.where(is_top_k_B[:, None], of_top_k_BV, warm_BV)
        of_top_p_BV = _top_p(warm_BV, rows.left_out_B[:, None])
        return jnp.where(is_top_p_B[:, None], of_top_p_BV, warm_BV)

    is_limited = jnp.any(~is_greedy_B & (is_top_k_B | is_top_p_B))
    warm_BV = jax.lax.cond(is_limited, limited, lambda warm_BV: warm_BV, warm_BV)
    least_B1 = jnp.max(warm_BV, axis=-1, keepdims=True) + jnp.log(rows.min_p_B)[:, None]
    warm_BV = jnp.where(warm_BV < least_B1, -jnp.inf, warm_BV)
    drawn_B = _draw(rows.seeds_B, rows.rows_B, positions_B, warm_BV)
    return jnp.where(is_greedy_B, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)


def _draw(seeds_B, rows_B, positions_B, logits_BV: jax.Array) -> jax.Array:
    """Draw a token for each row, int32[B]."""

    def draw(seed, row, position, logits_V: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(draw)(seeds_B, rows_B, positions_B, logits_BV).astype(jnp.int32)


def adjust_logits(sampling: Sampling, logits_BV: jax.Array, seen_BV: jax.Array | None) -> jax.Array:
    """Return the logits that a token is drawn from: -inf for tokens that cannot be drawn.

    Takes the same arguments as `choose`.
    """
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        factor = jnp.where(
            logits_BV > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty
        )
        logits_BV = jnp.where(seen_BV, logits_BV * factor, logits_BV)
    if sampling.banned:
        logits_BV = logits_BV.at[:, jnp.array(sampling.banned)].set(-jnp.inf)
    if sampling.is_greedy:
        return logits_BV
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None:
        logits_BV = _top_k(logits_BV, min(sampling.top_k, _MOST_TOKENS))
    if sampling.top_p < 1:
        logits_BV = _top_p(logits_BV, 1 - sampling.top_p)
    if sampling.min_p > 0:
        least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV


def _top_k(logits_BV: jax.Array, k: ArrayLike) -> jax.Array:
    """Return the logits with -inf for tokens that are not among the `k` most likely.

    Args:
        k: int, or int32[B, 1].
    """
    keys_BV = _sortable_bits(logits_BV)

    def are_few_above(key_B1: jax.Array) -> jax.Array:
        return jnp.sum(keys_BV > key_B1, axis=-1, keepdims=True) < k

    least_B1 = _first_key(are_few_above, keys_BV)
    return jnp.where(keys_BV < least_B1, -jnp.inf, logits_BV)


def _top_p(logits_BV: jax.Array, left_out: ArrayLike) -> jax.Array:
    """Return the logits with -inf for the least likely tokens of a share of at most `left_out`.

    Args:
        left_out: 1 - top-p: a number, or `[B, 1]`.
    """
    keys_BV = _sortable_bits(logits_BV)
    shares_BV = jax.nn.softmax(logits_BV, axis=-1)

    def is_too_much(key_B1: jax.Array) -> jax.Array:
        share_B1 = jnp.sum(jnp.where(keys_BV <= key_B1, shares_BV, 0), axis=-1, keepdims=True)
        return share_B1 > left_out

    # Rounding must not leave out the most likely token.
    most_B1 = jnp.max(keys_BV, axis=-1, keepdims=True)
    least_B1 = jnp.minimum(_first_key(is_too_much, keys_BV), most_B1)
    return jnp.where(keys_BV < least_B1, -jnp.inf, logits_BV)


def _sortable_bits(x: jax.Array) -> jax.Array:
    """Return an unsigned integer for each float, in the order of the floats."""
    num_bits = 8 * x.dtype.itemsize
    dtype = jnp.dtype(f"uint{num_bits}")
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), dtype)  # -0 is 0
    sign = jnp.asarray(1 << (num_bits - 1), dtype)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _first_key(holds: Callable[[jax.Array], jax.Array], keys_BV: jax.Array) -> jax.Array:
    """Return the lowest key of each row for which a condition holds, `[B, 1]`, as an unsigned int.

    The key is found bit by bit, because sorting a large vocabulary takes twenty times as long on a
    CPU.

    Args:
        holds: takes keys, `[B, 1]`, and returns bool[B, 1]. If it holds for a key, it holds for all
            higher ones. If it holds for none, the highest number is returned.
        keys_BV: keys, of which only the shape and the dtype matter.
    """
    dtype = keys_BV.dtype
    num_bits = 8 * dtype.itemsize

    def add_bit(i: jax.Array, key_B1: jax.Array) -> jax.Array:
        bit = jnp.asarray(1, dtype) << (num_bits - 1 - i).astype(dtype)
        return jnp.where(holds(key_B1 + (bit - 1)), key_B1, key_B1 + bit)

    key_B1 = jnp.zeros((*keys_BV.shape[:-1], 1), dtype)
    return jax.lax.fori_loop(0, num_bits, add_bit, key_B1)
