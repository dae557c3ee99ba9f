"""The base of text encoders: the pass over their stacks, their heads, and losses of heads.

The fields of a batch are in models/text/common.py. `targets` and `weights` are [B, T], except for
`head="sequence"`, where they are [B]: one label per row. For `head="pretraining"` a batch also has
`labels`, int32[B], which are 0 if the second text follows the first and 1 if it does not, and
`label_weights`, float32[B].

B batch, T seq, D embed, E token embed, V vocab, C labels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.activations import ACTIVATIONS, as_float32
from models.layers.basic import LayerNorm, Linear
from models.layers.dropout import dropout
from models.losses import VocabLogits
from models.stack import Sums, run_stacks
from models.text.common import check_has_loss, text_batch, vocab_loss
from sharding.ops.sequence import counted_once

#: `model.head` -> values of `data.objective` that it can be trained with. "masked_lm" predicts
#: masked tokens; "pretraining" also predicts whether two texts follow each other; "sequence"
#: predicts a label per row. "token" (a label per token), "replaced_token" (whether each token was
#: replaced by another model's) and "none" (activations) cannot be trained yet.
HEADS = {
    "masked_lm": ("masked_lm", "masked_lm_pairs"),
    "pretraining": ("masked_lm_pairs",),
    "sequence": ("classification",),
    "token": (),
    "replaced_token": (),
    "none": (),
}
#: Heads that predict masked tokens.
_OF_VOCAB = ("masked_lm", "pretraining")


class DenseHead(nnx.Module):
    """A dense layer, an activation and a norm, between the blocks and logits.

    Args:
        config: has `embed_dim`, `layer_norm_epsilon` and `init_stddev`.
        outputs: E, size of the result.
        activation: key of ACTIVATIONS.
        use_bias: whether the dense layer has a bias.
        norm_bias: whether the norm has a bias.
        rngs: random keys for the initialization.
    """

    def __init__(
        self,
        config: Any,
        outputs: int,
        *,
        activation: str,
        use_bias: bool = True,
        norm_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        sizes = {"embed": config.embed_dim}, {"_embed": outputs}
        self.dense = Linear(*sizes, stddev=config.init_stddev, use_bias=use_bias, rngs=rngs)
        epsilon = config.layer_norm_epsilon
        self.norm = LayerNorm(outputs, epsilon=epsilon, use_bias=norm_bias, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `[..., E]` for activations `[..., D]`."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(x)))


class EncoderModel(nnx.Module):
    """An encoder with one of HEADS.

    A subclass has a `config`, `token_embedding`, `classifier`, stacks and `embed`, as in
    models/stack.py, and the features that logits are computed from.
    """

    stacks: tuple[str, ...] = ("encoder",)
    can_split_sequence = True
    config: Any
    token_embedding: nnx.Param
    classifier: Linear | None

    @property
    def objectives(self) -> tuple[str, ...]:
        """Values of `data.objective` that the head can be trained with."""
        return HEADS[self.config.head]

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        raise NotImplementedError

    def apply_last_norm(self, x_BTD: jax.Array) -> jax.Array:
        """Return the activations that all heads read: by default, the output of the last block."""
        return x_BTD

    def vocab_features(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return `[B, T, E]`, from which the token embedding computes logits, and their bias."""
        raise NotImplementedError

    def vocab_logits(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits of the vocab."""
        x_BTE, bias_V = self.vocab_features(x_BTD)
        table_VE = self.token_embedding[...]
        return VocabLogits(x_BTE, table_VE, bias_V, vocab_size=self.config.vocab_size)

    def label_features(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return the input of the classifier, `[B, D]` or `[B, T, D]`."""
        raise NotImplementedError

    def label_logits(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return logits `[B, C]` or `[B, T, C]`."""
        x = self.label_features(x_BTD, batch)
        assert self.classifier is not None
        # The embedding uses site 0 of the same keys.
        return self.classifier(dropout(x, self.config.dropout, batch.get("dropout_keys"), site=1))

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[Sums, Sums, dict]:
        """Return (sums of weighted losses, sums of weights, sums of the head's metrics)."""
        config = self.config
        check_has_loss(config)
        x_BTD = self.apply_last_norm(x_BTD)
        if config.head not in _OF_VOCAB:
            loss, weight, hits = self._label_loss(x_BTD, batch, "targets", "weights")
            return loss, weight, {"accuracy": hits}
        loss, weight = vocab_loss(self.vocab_logits(x_BTD), batch, config.loss)
        if config.head == "masked_lm":
            return loss, weight, {}
        pair_loss, pair_weight, hits = self._label_loss(x_BTD, batch, "labels", "label_weights")
        losses = {"mlm_loss": loss, "nsp_loss": pair_loss}
        weights = {"mlm_loss": weight, "nsp_loss": pair_weight}
        return losses, weights, {"nsp_accuracy": (hits, pair_weight)}

    def __call__(
        self,
        tokens: jax.Array,
        attention_mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """Return the output of the head, in float32 except for `head="none"`.

        Args:
            tokens: int32[B, T].
            attention_mask: [B, T], 0 for padding; None for no padding.
            token_types: int32[B, T], 0 for the first text and 1 for the second; None if all are 0,
                or if the model has no token types.

        Returns:
            Logits of the vocab `[B, T, V]`, V without padding; logits of labels `[B, C]` or
            `[B, T, C]`; logits of whether tokens were replaced `[B, T]`; or activations
            `[B, T, D]`.

        Raises:
            ValueError: there are token types, but the model has none.
        """
        config = self.config
        batch = text_batch(tokens, attention_mask, vocab_size=config.vocab_size)
        if token_types is not None:
            if getattr(config, "num_token_types", 0) == 0:
                raise ValueError(
                    "token_types are for models with model.num_token_types of at least 1, but this "
                    "model has 0; leave them out"
                )
            batch["token_types"] = token_types
        x_BTD = self.apply_last_norm(run_stacks(self, self.embed(batch), batch))
        if config.head == "none":
            return x_BTD
        if config.head not in _OF_VOCAB:
            logits = as_float32(self.label_logits(x_BTD, batch))
            return logits[..., 1] if config.head == "replaced_token" else logits
        return self.vocab_logits(x_BTD).whole()

    def _label_loss(
        self, x_BTD: jax.Array, batch: dict, targets: str, weights: str
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (sum of weighted losses, sum of weights, sum of the weights of hits).

        Args:
            x_BTD: input of the head.
            batch: has the arrays that the following keys name.
            targets: key of int32[...], in [0, C).
            weights: key of float32[...]; targets with weight 0 are ignored.
        """
        logits = as_float32(self.label_logits(x_BTD, batch))
        # The cross-entropy of models/losses.py is for a vocab that stages may share, unlike labels.
        flat = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
        labels = batch[targets]
        losses = -jnp.take_along_axis(flat, labels.reshape(-1, 1), axis=1)[:, 0]
        counted = counted_once(batch[weights]).reshape(-1).astype(losses.dtype)
        hits = (jnp.argmax(logits, axis=-1) == labels).reshape(-1)
        return jnp.sum(losses * counted), jnp.sum(counted), jnp.sum(jnp.where(hits, counted, 0))
