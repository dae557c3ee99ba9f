"""The rows of a batch that are continued, between two passes of the model.

B batch, M most new tokens, V vocab.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from generate.sampling import Sampling, choose

#: Stands for no token, and for no row.
NONE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The tokens of the rows so far, and the state needed to choose the next ones."""

    newest_B: jax.Array  # int32, the newest token
    positions_B: jax.Array  # int32, its position
    is_done_B: jax.Array  # bool, whether it is a stop token or the last one, or the row is padding
    seen_BV: jax.Array | None  # bool, tokens that the row has; None without a repetition penalty
    numbers_B: jax.Array  # int32, number of the row in the request; `NONE` for padding
    new_BM: jax.Array  # int32, the new tokens, and then `NONE`
    counts_B: jax.Array  # int32, number of new tokens

    @classmethod
    def of_prompts(
        cls,
        tokens_BT: jax.Array,
        lengths_B: jax.Array,
        numbers_B: jax.Array,
        *,
        max_new_tokens: int,
        seen_size: int | None,
    ) -> "Rows":
        """Return rows without new tokens.

        Args:
            tokens_BT: int32, prompts; padding follows them.
            max_new_tokens: M.
            seen_size: V, if there is a repetition penalty.
        """
        size, length = tokens_BT.shape
        seen_BV = None
        if seen_size is not None:
            is_token_BT = jnp.arange(length) < lengths_B[:, None]
            ids_BT = jnp.where(is_token_BT, tokens_BT, seen_size)
            seen_BV = jnp.zeros((size, seen_size), bool)
            seen_BV = seen_BV.at[jnp.arange(size)[:, None], ids_BT].set(True, mode="drop")
        return cls(
            newest_B=tokens_BT[:, 0],
            positions_B=lengths_B - 1,
            is_done_B=numbers_B == NONE,
            seen_BV=seen_BV,
            numbers_B=numbers_B,
            new_BM=jnp.full((size, max_new_tokens), NONE, jnp.int32),
            counts_B=jnp.zeros(size, jnp.int32),
        )

    def with_next(
        self,
        sampling: Sampling,
        stop: Sequence[int],
        logits_BV: jax.Array,
        goes_on_B: jax.Array | None = None,
    ) -> "Rows":
        """Return the rows with one more token each, unless they are done.

        Args:
            logits_BV: logits after the newest token.
            goes_on_B: bool, whether the row gets a token; None: all do.
        """
        goes_on_B = ~self.is_done_B if goes_on_B is None else goes_on_B & ~self.is_done_B
        positions_B = self.positions_B + 1
        chosen_B = choose(sampling, logits_BV, self.seen_BV, self.numbers_B, positions_B)
        max_new_tokens = self.new_BM.shape[1]
        each_B = jnp.arange(len(chosen_B))
        places_B = jnp.where(goes_on_B, self.counts_B, max_new_tokens)
        seen_BV = self.seen_BV
        if seen_BV is not None:
            ids_B = jnp.where(goes_on_B, chosen_B, seen_BV.shape[1])
            seen_BV = seen_BV.at[each_B, ids_B].set(True, mode="drop")
        counts_B = self.counts_B + goes_on_B
        is_last_B = jnp.isin(chosen_B, jnp.array(stop, jnp.int32)) | (counts_B == max_new_tokens)
        return Rows(
            newest_B=jnp.where(goes_on_B, chosen_B, self.newest_B),
            positions_B=jnp.where(goes_on_B, positions_B, self.positions_B),
            is_done_B=self.is_done_B | (goes_on_B & is_last_B),
            seen_BV=seen_BV,
            numbers_B=self.numbers_B,
            new_BM=self.new_BM.at[each_B, places_B].set(chosen_B, mode="drop"),
            counts_B=counts_B,
        )

    def with_checked(
        self,
        sampling: Sampling,
        stop: Sequence[int],
        drafts_BD: jax.Array,
        logits_BTV: jax.Array,
    ) -> "Rows":
        """Return the rows with 1 to D + 1 more tokens each, up to the first draft that is wrong.

        Args:
            drafts_BD: int32, proposals for the next tokens; D may be 0.
            logits_BTV: logits after the newest token, and after each draft; T = D + 1.
        """
        size, count = logits_BTV.shape[:2]
        drafts_BT = jnp.pad(drafts_BD, ((0, 0), (0, 1)), constant_values=NONE)

        def step(place: jax.Array, carry: tuple[Rows, jax.Array]) -> tuple[Rows, jax.Array]:
            # These logits come after drafts, so they count if all of them were right.
            rows, is_right_B = carry
            rows = rows.with_next(sampling, stop, logits_BTV[:, place], is_right_B)
            return rows, is_right_B & (rows.newest_B == drafts_BT[:, place])

        return jax.lax.fori_loop(0, count, step, (self, jnp.ones(size, bool)))[0]
