"""Speculative decoding: drafts of the next tokens, which the model checks in one pass.

    rows ──> D drafts ──> decode: logits after each ──> choose ──> 1 to D + 1 new tokens ──> rows

The model chooses each token from its own logits and with its own random number, as without drafts,
and a draft only counts if it is the token that was chosen. So drafts change how many passes a text
takes, but not the text. They come from a smaller model, or from the text itself: the continuation
of an earlier occurrence of the last few tokens.

The smaller model draws with the random numbers of the model, so that both mostly draw the same
token if their probabilities are similar.

B batch, T prompt seq, D drafts, M most new tokens, L = T + M, V vocab.

Source: drafts of a model: Leviathan et al. 2023 (arXiv:2211.17192); of the text: Saxena 2023
(github.com/apoorvumang/prompt-lookup-decoding).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from generate.decoder import Caches, Decoder, decoder_of
from generate.rows import NONE, Rows
from generate.sampling import Sampling, choose

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
    """How the next tokens are drafted.

    Attributes:
        num_tokens: D, drafts that the model checks in a pass.
        model: smaller model with the same tokenizer; None takes drafts from the text.
        max_ngram: most tokens that are looked for in the text.
    """

    num_tokens: int = 4
    model: Any = None
    max_ngram: int = 3

    def __post_init__(self):
        for name in ("num_tokens", "max_ngram"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of drafts must be at least 1")


class Drafter:
    """Proposes the next tokens of rows. This one proposes none, so each pass finds one token.

    Attributes:
        num_tokens: D.
        max_positions: most tokens of a prompt and its continuation; None: any number.
        params: parameters of the draft model, passed to both methods; None without one.
    """

    num_tokens: int = 0
    max_positions: int | None = None
    params: Tree = None

    def begin(
        self, params: Tree, tokens_BT: jax.Array, lengths_B: jax.Array, max_new_tokens: int
    ) -> Tree:
        """Return the drafter's state after the prompts; arguments as for `Decoder.prefill`."""
        return None

    def propose(
        self, params: Tree, memory: Tree, rows: Rows, sampling: Sampling
    ) -> tuple[jax.Array, Tree]:
        """Return drafts int32[B, D], and the drafter's new state.

        Args:
            params: parameters of the draft model.
            memory: drafter's state, from the last call or from `begin`.
            rows: rows; each has at least one new token.
            sampling: how the model chooses tokens.
        """
        return jnp.zeros((len(rows.newest_B), 0), jnp.int32), None


def drafter_of(drafts: Drafts | None, model: Any, decoder: Decoder, start: int | None) -> Drafter:
    """Return the drafter that proposes tokens to a model.

    Args:
        drafts: where drafts come from; None: there are none.
        start: as for `decoder_of`.

    Raises:
        ValueError: the drafts come from a model that does not fit.
    """
    if drafts is None:
        return Drafter()
    if drafts.model is None:
        return NGrams(drafts)
    own_decoder = decoder_of(drafts.model, start)
    if own_decoder.follows_prompt != decoder.follows_prompt:
        raise ValueError(
            f"a {type(drafts.model).__name__} cannot draft for a {type(model).__name__}: one "
            "continues a prompt, the other answers it; take drafts from a model of the same kind"
        )
    return ModelDrafts(drafts, own_decoder, model.config.vocab_size)


class NGrams(Drafter):
    """Proposes the continuation of an earlier occurrence of a row's last tokens.

    The longest match wins, and among equally long ones the latest. Without a match, the newest
    token is repeated.
    """

    def __init__(self, drafts: Drafts):
        self.num_tokens = drafts.num_tokens
        self._max_ngram = drafts.max_ngram

    def begin(
        self, params: None, tokens_BT: jax.Array, lengths_B: jax.Array, max_new_tokens: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return the prompts and their lengths; see `Drafter`."""
        return tokens_BT, lengths_B

    def propose(
        self,
        params: None,
        memory: tuple[jax.Array, jax.Array],
        rows: Rows,
        sampling: Sampling,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """See `Drafter`."""
        tokens_BT, lengths_B = memory
        drafts_BD = following(
            _append(tokens_BT, lengths_B, rows.new_BM),
            lengths_B + rows.counts_B,
            num_tokens=self.num_tokens,
            max_ngram=self._max_ngram,
        )
        return drafts_BD, memory


def following(
    text_BL: jax.Array, lengths_B: jax.Array, *, num_tokens: int, max_ngram: int
) -> jax.Array:
    """Return the continuations of earlier occurrences of the texts' last tokens, int32[B, D].

    Args:
        text_BL: int32, texts, each followed by padding, which is not read.
        lengths_B: int32, number of tokens of each text, at least 1.
        max_ngram: most tokens that are looked for.
    """
    last_B1 = lengths_B[:, None] - 1
    places_L = jnp.arange(text_BL.shape[1], dtype=jnp.int32)
    matches_BL = jnp.zeros_like(text_BL)  # how many tokens up to this place are the last ones
    goes_on_BL = places_L < last_B1
    for back in range(max_ngram):
        wanted_B1 = jnp.take_along_axis(text_BL, jnp.maximum(last_B1 - back, 0), axis=1)
        shifted_BL = jnp.roll(text_BL, back, axis=1)
        goes_on_BL &= (shifted_BL == wanted_B1) & (places_L >= back)
        matches_BL += goes_on_BL
    # The latest place of the longest match; without a match, the place before the last.
    scores_BL = matches_BL * len(places_L) + places_L
    scores_BL = jnp.where(places_L < last_B1, scores_BL, -1)
    found_B1 = jnp.argmax(scores_BL, axis=1)[:, None].astype(jnp.int32)
    # The text after it may be shorter than the drafts; it is repeated then.
    period_B1 = jnp.maximum(last_B1 - found_B1, 1)
    ahead_D = jnp.arange(num_tokens, dtype=jnp.int32)
    places_BD = jnp.minimum(found_B1 + 1 + ahead_D % period_B1, last_B1)
    return jnp.take_along_axis(text_BL, places_BD, axis=1)


def _append(tokens_BT: jax.Array, lengths_B: jax.Array, new_BM: jax.Array) -> jax.Array:
    """Return prompts with the new tokens after them, int32[B, L]."""
    num_prompt, num_new = tokens_BT.shape[1], new_BM.shape[1]
    places_L = jnp.arange(num_prompt + num_new, dtype=jnp.int32)
    is_prompt_BL = places_L < lengths_B[:, None]
    prompt_BL = jnp.pad(tokens_BT, ((0, 0), (0, num_new)), constant_values=NONE)
    new_places_BL = jnp.clip(places_L - lengths_B[:, None], 0, num_new - 1)
    new_BL = jnp.take_along_axis(new_BM, new_places_BL, axis=1)
    return jnp.where(is_prompt_BL, prompt_BL, new_BL)


class ModelDrafts(Drafter):
    """Proposes the tokens that a smaller model chooses."""

    def __init__(self, drafts: Drafts, decoder: Decoder, vocab_size: int):
        self.num_tokens = drafts.num_tokens
        # Models with the same tokenizer may have different numbers of ids that no token uses.
        self._vocab_size = vocab_size
        self._own_vocab_size = drafts.model.config.vocab_size
        self._decoder = decoder
        self.max_positions = decoder.max_positions
        self.params = decoder.params_of(drafts.model)

    def begin(
        self, params: Tree, tokens_BT: jax.Array, lengths_B: jax.Array, max_new_tokens: int
    ) -> Caches:
        """Return caches of the prompts; see `Drafter`."""
        _, caches = self._decoder.prefill(
            params, self._known(tokens_BT), lengths_B, max_new_tokens, self.num_tokens
        )
        return caches

    def propose(
        self, params: Tree, memory: Caches, rows: Rows, sampling: Sampling
    ) -> tuple[jax.Array, Caches]:
        """See `Drafter`."""
        size = len(rows.newest_B)
        each_B = jnp.arange(size)

        def step(ahead: jax.Array, carry: Any) -> Any:
            newest_B, seen_BV, drafts_BT, caches = carry
            positions_B = rows.positions_B + ahead
            logits_B1V, caches = self._decoder.decode(
                params, self._known(newest_B)[:, None], positions_B, caches
            )
            logits_BV = _resize(logits_B1V[:, 0], self._vocab_size)
            newest_B = choose(sampling, logits_BV, seen_BV, rows.numbers_B, positions_B + 1)
            if seen_BV is not None:
                seen_BV = seen_BV.at[each_B, newest_B].set(True)
            return newest_B, seen_BV, drafts_BT.at[:, ahead].set(newest_B), caches

        # One more pass puts the last draft into the caches, where it is needed if it is right.
        count = self.num_tokens + 1
        drafts_BT = jnp.zeros((size, count), jnp.int32)
        carry = rows.newest_B, rows.seen_BV, drafts_BT, memory
        _, _, drafts_BT, caches = jax.lax.fori_loop(0, count, step, carry)
        return drafts_BT[:, : self.num_tokens], caches

    def _known(self, tokens: jax.Array) -> jax.Array:
        """Return tokens with ids that its own model has."""
        return jnp.minimum(tokens, self._own_vocab_size - 1)


def _resize(logits_BV: jax.Array, vocab_size: int) -> jax.Array:
    """Cut the logits to the size of a vocab, or pad them with -inf."""
    num_added = max(vocab_size - logits_BV.shape[1], 0)
    padded = jnp.pad(logits_BV, ((0, 0), (0, num_added)), constant_values=-jnp.inf)
    return padded[:, :vocab_size]
