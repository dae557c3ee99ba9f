"""A batch of rows that begin and end at different times, for continuous batching.

    prompts ──> prefill ──> caches of a few rows ──┐
                                                   v
    slots: caches, newest token, position ──> decode a few tokens of every row ──> slots, new tokens

A row is put into a slot when one is free, next to rows that are being continued. Shapes never
change, so two programs suffice, plus one prefill for each length that prompts are padded to.

B slots, P rows of a prefill, T prompt seq, M new tokens, V vocab.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from generate.batches import check_batch_size
from generate.decoder import Caches, decoder_of
from generate.sampling import RowSampling, Sampling, choose_each
from sharding.logical import axis_rules
from sharding.rules import rules_on

Tree = Any

#: Prompts are padded to this, or to a power of two times this.
_LEAST_LENGTH = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """The rows between two tokens."""

    caches: Caches  # all tokens of each row but the newest
    newest_B: jax.Array  # int32, the newest token
    positions_B: jax.Array  # int32, its position
    sampling: RowSampling  # how tokens are chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt that takes a slot."""

    slot: int  # number of the slot
    tokens: Sequence[int]  # token ids, at least one
    sampling: Sampling  # how its continuation is chosen
    number: int  # number of the row in its request


class Slots:
    """Continues the rows in its slots. Use it on the mesh that the model was loaded on.

    Args:
        model: causal language model, as from `convert.from_hf.load`.
        num_slots: most rows at the same time; a multiple of the number of replicas of the mesh.
        max_length: most tokens of a prompt and its continuation; at most the model's positions.
        tokens_per_call: M, tokens that a call of `advance` adds to each row.

    Attributes:
        rows_per_prefill: P, most rows that `begin` takes.

    Raises:
        ValueError: the model does not continue prompts, or a number does not fit.
    """

    def __init__(self, model: Any, *, num_slots: int, max_length: int, tokens_per_call: int):
        mesh = jax.sharding.get_mesh()
        self.rows_per_prefill = check_batch_size(mesh, num_slots)
        self._decoder = decoder_of(model)
        max_positions = self._decoder.max_positions
        if max_length < 2 or (max_positions is not None and max_length > max_positions):
            raise ValueError(
                f"max_length={max_length} must be at least 2, and at most the model's "
                f"{max_positions} positions"
            )
        self._num_slots = num_slots
        self._max_length = max_length
        self._tokens_per_call = tokens_per_call
        self._params = self._decoder.params_of(model)
        # Within these functions, activations follow the rules of the mesh.
        on_mesh = axis_rules(rules_on(mesh))
        self._prefill = jax.jit(on_mesh(self._prefilled))
        self._insert = jax.jit(_inserted, donate_argnames="state")
        self._advance = jax.jit(on_mesh(self._advanced), donate_argnames="state")
        self._state = self._empty()

    def begin(self, rows: Sequence[Row]) -> list[int]:
        """Put rows into their slots; return the first new token of each.

        Args:
            rows: at most P rows.
        """
        count = self.rows_per_prefill
        longest = max(len(row.tokens) for row in rows)
        length = _LEAST_LENGTH
        while length < longest:
            length *= 2
        tokens_PT = np.zeros((count, min(length, self._max_length)), np.int32)
        lengths_P = np.ones(count, np.int32)
        slots_P = np.full(count, self._num_slots, np.int32)  # no slot: such rows are dropped
        for place, row in enumerate(rows):
            tokens_PT[place, : len(row.tokens)] = row.tokens
            lengths_P[place] = len(row.tokens)
            slots_P[place] = row.slot
        settings = [(row.sampling, row.number) for row in rows]
        settings += [(Sampling(), 0)] * (count - len(rows))
        new = self._prefill(self._params, tokens_PT, lengths_P, RowSampling.of(settings))
        self._state = self._insert(new, slots_P, state=self._state)
        return np.asarray(new.newest_B)[: len(rows)].tolist()

    def warm_up(self) -> None:
        """Compile the programs that most requests need.

        Raises:
            ValueError: there is not enough memory for the longest prompt.
        """
        try:
            for length in (1, self._max_length - 1):
                self.begin([Row(slot=0, tokens=[0] * length, sampling=Sampling(), number=0)])
                # On a mesh, its result has another sharding than the empty slots had.
                self.advance(np.zeros(self._num_slots, bool))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(
                f"batch_size={self._num_slots} rows of max_length={self._max_length} tokens need "
                "more memory than there is; make one of them smaller, or use more devices"
            ) from error

    def advance(self, is_active_B: np.ndarray) -> np.ndarray:
        """Continue the active rows; return their new tokens, int32[B, M].

        Args:
            is_active_B: bool, whether a slot has a row to continue.
        """
        self._state, new_BM = self._advance(self._params, is_active_B, state=self._state)
        return np.asarray(new_BM)

    def _empty(self) -> _State:
        """Return slots without rows."""
        count = self.rows_per_prefill
        shapes = jax.eval_shape(
            self._prefill,
            self._params,
            jax.ShapeDtypeStruct((count, _LEAST_LENGTH), jnp.int32),
            jax.ShapeDtypeStruct((count,), jnp.int32),
            RowSampling.of([(Sampling(), 0)] * count),
        )

        def zeros() -> _State:
            return jax.tree.map(
                lambda leaf: jnp.zeros((self._num_slots, *leaf.shape[1:]), leaf.dtype), shapes
            )

        return jax.jit(zeros)()

    def _prefilled(
        self, params: Tree, tokens_PT: jax.Array, lengths_P: jax.Array, sampling: RowSampling
    ) -> _State:
        """Run the prompts, and choose the first token of each row."""
        more = self._max_length - tokens_PT.shape[1]
        logits_PV, caches = self._decoder.prefill(params, tokens_PT, lengths_P, more)
        newest_P = choose_each(sampling, logits_PV, lengths_P)
        return _State(caches=caches, newest_B=newest_P, positions_B=lengths_P, sampling=sampling)

    def _advanced(
        self, params: Tree, is_active_B: jax.Array, *, state: _State
    ) -> tuple[_State, jax.Array]:
        """Add a few tokens to each active row."""
        sampling = state.sampling.without_limits_of_others(is_active_B)

        def step(count: jax.Array, carry: tuple[_State, jax.Array]) -> tuple[_State, jax.Array]:
            state, new_BM = carry
            logits_B1V, caches = self._decoder.decode(
                params, state.newest_B[:, None], state.positions_B, state.caches
            )
            positions_B = state.positions_B + is_active_B
            newest_B = choose_each(sampling, logits_B1V[:, 0], positions_B)
            state = dataclasses.replace(
                state, caches=caches, newest_B=newest_B, positions_B=positions_B
            )
            return state, new_BM.at[:, count].set(newest_B)

        new_BM = jnp.zeros((self._num_slots, self._tokens_per_call), jnp.int32)
        return jax.lax.fori_loop(0, self._tokens_per_call, step, (state, new_BM))


def _inserted(new: _State, slots_P: jax.Array, *, state: _State) -> _State:
    """Return the state with rows put into slots."""
    return jax.tree.map(lambda old, rows: old.at[slots_P].set(rows, mode="drop"), state, new)
