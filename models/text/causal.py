"""What causal language models share: the pass over their stacks, the head, and its outputs.

B batch, T seq, D embed, V vocab.
"""

from typing import Any

import jax
from flax import nnx

from models.losses import VocabLogits
from models.stack import run_stacks
from models.text.common import check_has_loss, text_batch, vocab_loss


class CausalModel(nnx.Module):
    """A model that predicts each token from those before it.

    A subclass has a `config`, stacks, `embed` and `outputs`; see models/stack.py.
    """

    stacks: tuple[str, ...] = ("decoder",)
    loss_stacks: tuple[str, ...] = ()
    can_split_sequence = True
    objectives = ("causal_lm", "chat", "preference")
    config: Any

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        raise NotImplementedError

    def outputs(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for the activations after the last block."""
        raise NotImplementedError

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted token losses, sum of weights, no further metrics)."""
        check_has_loss(self.config)
        return *vocab_loss(self.outputs(x_BTD), batch, self.config.loss), {}

    def __call__(self, tokens: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Return logits, or activations for `head="none"`.

        Args:
            tokens: int32[B, T].
            attention_mask: [B, T], 0 for padding; None for no padding.

        Returns:
            Logits float32[B, T, V], V without padding, or activations `[B, T, E]`.
        """
        batch = text_batch(tokens, attention_mask, vocab_size=self.config.vocab_size)
        x_BTD = run_stacks(self, self.embed(batch), batch)
        return self.outputs(x_BTD).x_BTD if self.config.head == "none" else self.logits(x_BTD)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits float32[B, T, V] for the activations after the last block."""
        return self.outputs(x_BTD).whole()
