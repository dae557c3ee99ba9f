"""Beam search: the continuations with the highest probability, of those that a search of K finds.

    prompt ──prefill──> K beams ──> K · V continuations by a token ──> the best C of them
                          ^                                                │         │
                          └────────── the best K that go on ───────────────┘         │
                                      the best K that have ended <───────────────────┘

C is (1 + number of stop tokens) · K, so that K beams are left even if all others end. The scores,
the length penalty and the rule that ends the search are the same as in `transformers.generate`.

B prompts, K beams, R = B · K rows, C candidates, V vocab, M new tokens.

Source: Sutskever et al. 2014 (arXiv:1409.3215), section 3.2; length penalty: Wu et al. 2016
(arXiv:1609.08144), section 7.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from generate.decoder import Caches, Decoder
from generate.rows import NONE

Tree = Any

#: Added to the score of a beam that may not be chosen.
_NEVER = -1e9
#: Beyond it, scores of long continuations are not finite.
_MOST_PENALTY = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beams:
    """How beams are searched.

    Attributes:
        num_beams: K.
        length_penalty: score of an ended beam is its log-probability divided by the number of
            its tokens to the power of this; more favors longer continuations.
        early_stopping: True ends the search as soon as K beams have ended, "never" when no beam
            can become better than these, False when none is likely to.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self):
        if self.num_beams < 1:
            raise ValueError(f"num_beams={self.num_beams} must be at least 1")
        if not abs(self.length_penalty) <= _MOST_PENALTY:
            raise ValueError(
                f"length_penalty={self.length_penalty} must be from {-_MOST_PENALTY} to "
                f"{_MOST_PENALTY}"
            )
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"early_stopping={self.early_stopping!r} must be True, False or 'never'"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamState:
    """A search between two tokens."""

    caches: Caches  # tokens of the beams that go on, but the newest; with R rows
    positions_R: jax.Array  # int32, position of the newest token
    tokens_BKM: jax.Array  # int32, new tokens of the beams that go on; -1 for none
    scores_BK: jax.Array  # their log-probabilities
    ended_BKM: jax.Array  # int32, new tokens of the best beams that have ended
    ended_scores_BK: jax.Array  # their scores
    has_ended_BK: jax.Array  # bool, whether there is such a beam
    can_improve_B: jax.Array  # bool, whether a beam that goes on may become one of the best
    count: jax.Array  # int32[], number of new tokens


class BeamSearch:
    """Searches beams with a model."""

    def __init__(self, decoder: Decoder, stop: tuple[int, ...]):
        self._decoder = decoder
        self._stop = stop

    def first(
        self,
        max_new_tokens: int,
        beams: Beams,
        params: Tree,
        tokens_BT: jax.Array,
        lengths_B: jax.Array,
        is_prompt_B: jax.Array,
    ) -> BeamState:
        """Run the prompts, and choose the first token of each beam.

        Args:
            max_new_tokens: M.
            params: this and the next two are as for `Decoder.prefill`.
            is_prompt_B: bool, false for rows that only fill up the batch.
        """
        size = len(lengths_B)
        shape = size, beams.num_beams
        logits_BV, caches = self._decoder.prefill(params, tokens_BT, lengths_B, max_new_tokens)
        _, given_B = self._decoder.given(tokens_BT, lengths_B)

        def repeated(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, beams.num_beams, axis=0)

        scores_K = jnp.full(beams.num_beams, _NEVER, logits_BV.dtype).at[0].set(0)
        state = BeamState(
            caches=jax.tree.map(repeated, caches),
            positions_R=repeated(given_B) - 1,
            tokens_BKM=jnp.full((*shape, max_new_tokens), NONE, jnp.int32),
            # All beams of a prompt are the same still, so only one counts.
            scores_BK=jnp.broadcast_to(scores_K, shape),
            ended_BKM=jnp.full((*shape, max_new_tokens), NONE, jnp.int32),
            ended_scores_BK=jnp.full(shape, _NEVER, logits_BV.dtype),
            has_ended_BK=jnp.broadcast_to(~is_prompt_B[:, None], shape),
            can_improve_B=is_prompt_B,
            count=jnp.int32(0),
        )
        return self._with_next(state, repeated(logits_BV), beams)

    def rest(self, beams: Beams, params: Tree, *, state: BeamState) -> BeamState:
        """Search until no beam can improve, or until all have M tokens."""
        max_new_tokens = state.tokens_BKM.shape[2]

        def goes_on(state: BeamState) -> jax.Array:
            is_full = jnp.all(state.has_ended_BK) & (beams.early_stopping is True)
            return (state.count < max_new_tokens) & jnp.any(state.can_improve_B) & ~is_full

        def step(state: BeamState) -> BeamState:
            newest_R1 = state.tokens_BKM[:, :, state.count - 1].reshape(-1, 1)
            logits_R1V, caches = self._decoder.decode(
                params, newest_R1, state.positions_R, state.caches
            )
            state = dataclasses.replace(state, caches=caches)
            return self._with_next(state, logits_R1V[:, 0], beams)

        return jax.lax.while_loop(goes_on, step, state)

    def _with_next(self, state: BeamState, logits_RV: jax.Array, beams: Beams) -> BeamState:
        """Return the state with one more token."""
        size, num_beams, max_new_tokens = state.tokens_BKM.shape
        num_tokens = logits_RV.shape[1]
        log_probs_RV = jax.nn.log_softmax(logits_RV, axis=-1)
        totals_BKV = log_probs_RV.reshape(size, num_beams, num_tokens) + state.scores_BK[..., None]
        num_candidates = min(max(2, 1 + len(self._stop)), num_tokens) * num_beams
        scores_BC, numbers_BC = jax.lax.top_k(totals_BKV.reshape(size, -1), num_candidates)
        parents_BC = numbers_BC // num_tokens
        newest_BC = (numbers_BC % num_tokens).astype(jnp.int32)
        tokens_BCM = _chosen(state.tokens_BKM, parents_BC).at[:, :, state.count].set(newest_BC)
        count = state.count + 1
        ends_BC = jnp.isin(newest_BC, jnp.array(self._stop, jnp.int32)) | (count == max_new_tokens)
        going_BC = scores_BC + jnp.where(ends_BC, _NEVER, 0)
        next_scores_BK, next_BK = jax.lax.top_k(going_BC, num_beams)
        rows_BK = _chosen(parents_BC, next_BK) + num_beams * jnp.arange(size)[:, None]
        state = self._with_ended(state, tokens_BCM, scores_BC, ends_BC, beams)
        return dataclasses.replace(
            state,
            caches=_caches_of(rows_BK.reshape(-1), state.caches),
            positions_R=state.positions_R + 1,
            tokens_BKM=_chosen(tokens_BCM, next_BK),
            scores_BK=next_scores_BK,
            can_improve_B=self._can_improve(state, next_scores_BK[:, 0], count, beams),
            count=count,
        )

    def _with_ended(
        self,
        state: BeamState,
        tokens_BCM: jax.Array,
        scores_BC: jax.Array,
        ends_BC: jax.Array,
        beams: Beams,
    ) -> BeamState:
        """Return the state with the candidates among its ended beams that end and are good."""
        num_beams = beams.num_beams
        length = (state.count + 1).astype(scores_BC.dtype)
        # Candidates after the first K are only there to replace those that end.
        is_new_BC = ends_BC & (jnp.arange(scores_BC.shape[1]) < num_beams)
        is_full_B1 = jnp.all(state.has_ended_BK, axis=1, keepdims=True)
        is_closed_B1 = is_full_B1 & (beams.early_stopping is True) | ~state.can_improve_B[:, None]
        scores_BC = scores_BC / length**beams.length_penalty
        scores_BC += jnp.where(is_closed_B1, _NEVER, 0) + jnp.where(is_new_BC, 0, _NEVER)
        all_scores = jnp.concatenate([state.ended_scores_BK, scores_BC], axis=1)
        best_scores_BK, best_BK = jax.lax.top_k(all_scores, num_beams)
        all_tokens = jnp.concatenate([state.ended_BKM, tokens_BCM], axis=1)
        all_ended = jnp.concatenate([state.has_ended_BK, is_new_BC], axis=1)
        return dataclasses.replace(
            state,
            ended_BKM=_chosen(all_tokens, best_BK),
            ended_scores_BK=best_scores_BK,
            has_ended_BK=_chosen(all_ended, best_BK),
        )

    def _can_improve(
        self, state: BeamState, best_B: jax.Array, count: jax.Array, beams: Beams
    ) -> jax.Array:
        """Return bool[B]: whether a beam that goes on may become better than one that has ended."""
        max_new_tokens = state.tokens_BKM.shape[2]
        is_long = beams.early_stopping == "never" and beams.length_penalty > 0
        length = jnp.where(is_long, max_new_tokens, count).astype(best_B.dtype)
        possible_B1 = (best_B / length**beams.length_penalty)[:, None]
        worst_B1 = jnp.min(state.ended_scores_BK, axis=1, keepdims=True)
        worst_BK = jnp.where(state.has_ended_BK, worst_B1, _NEVER)
        return state.can_improve_B & jnp.any(possible_B1 > worst_BK, axis=1)


def _caches_of(rows_R: jax.Array, caches: Caches) -> Caches:
    """Return the caches of some beams; the fixed ones are the same for all beams of a prompt."""
    return tuple(
        cache if cache.is_fixed else jax.tree.map(lambda x: x[rows_R], cache) for cache in caches
    )


def _chosen(values: jax.Array, numbers_BN: jax.Array) -> jax.Array:
    """Return `values[b, numbers[b, n]]`, `[B, N, ...]`, from `[B, C, ...]`."""
    indices = numbers_BN.reshape(*numbers_BN.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, indices, axis=1)
