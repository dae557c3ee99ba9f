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

import jax
import jax.numpy as jnp


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
        for name, is_valid, rule in (
            ("temperature", self.temperature >= 0, "0 or positive"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive"),
            ("seed", 0 <= self.seed < 2**32, "in [0, 2**32)"),
        ):
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")

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
        sampling: the settings.
        logits_BV: logits, float32 or wider.
        seen_BV: bool, tokens that the row has; may be None without a repetition penalty.
        rows_B: int32, number of the row in the request.
        positions_B: int32, position that the token will have.
    """
    logits_BV = adjusted(sampling, logits_BV, seen_BV)
    if sampling.is_greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    key = jax.random.key(sampling.seed)

    def draw(row: jax.Array, position: jax.Array, logits_V: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, row), position)
        return jax.random.categorical(own, logits_V)

    return jax.vmap(draw)(rows_B, positions_B, logits_BV).astype(jnp.int32)


def adjusted(sampling: Sampling, logits_BV: jax.Array, seen_BV: jax.Array | None) -> jax.Array:
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
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        logits_BV = jnp.where(logits_BV < _least_of_top_p(sampling, logits_BV), -jnp.inf, logits_BV)
    if sampling.min_p > 0:
        least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV


def _least_of_top_p(sampling: Sampling, logits_BV: jax.Array) -> jax.Array:
    """Return the lowest logit of the tokens that top-p keeps, `[B, 1]`."""
    rising_BV = jnp.sort(logits_BV, axis=-1)
    sums_BV = jnp.cumsum(jax.nn.softmax(rising_BV, axis=-1), axis=-1)
    is_left_out_BV = sums_BV <= 1 - sampling.top_p
    # Rounding must not leave out the most likely token.
    is_left_out_BV = is_left_out_BV.at[:, -1].set(False)
    return jnp.min(jnp.where(is_left_out_BV, jnp.inf, rising_BV), axis=-1, keepdims=True)
