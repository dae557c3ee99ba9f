"""ModernBERT: an encoder with norms before branches, rotary positions and windows around tokens.

Every third layer attends to all tokens, the others to those nearby. The first layer has no norm
before its attention, since the embeddings have one.

The fields of a batch are in models/text/encoder.py.

B batch, T seq, D embed, V vocab.

Source: Warner et al. 2024 (arXiv:2412.13663), section 2.1.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from models.field_checks import check_choices
from models.layers.activations import check_activation
from models.layers.basic import LayerNorm, Linear, lookup
from models.layers.block import Block, attention_of, mlp_of, norm_of
from models.layers.dropout import dropout
from models.text.common import BlockConfig
from models.text.encoder import DenseHead, EncoderModel
from models.text.layer_types import LayerTypesConfig, stacks_of
from sharding.ops.sequence import sum_over_tokens, whole_length

#: Values of `model.head`; see models/text/encoder.py.
_HEADS = ("masked_lm", "sequence", "token", "none")
#: Values of `model.pool`.
_POOLS = ("class_token", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertConfig(BlockConfig, LayerTypesConfig):
    """Sizes, regularization and head of a ModernBERT."""

    layer_types: Sequence[str] = ("full", "window", "window")  # repeated over the layers
    sliding_window: int | None = 65  # distance from which tokens do not see each other
    rope_theta: float = 160000.0  # base of the rotary wavelengths
    window_rope_theta: float | None = 10000.0  # the same in layers with a window
    dropout: float = 0.0  # rate for embeddings, residual branches and classifiers, in [0, 1)
    head: str  # masked_lm | sequence | token | none
    num_labels: int = 2  # for the heads "sequence" and "token"
    pool: str = "class_token"  # input of the head "sequence": class_token | mean, of all tokens
    head_activation: str = "gelu"
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False  # of the dense layer before the logits
    vocab_bias: bool = True  # of the logits of tokens

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        self.check_rotation()
        check_choices(self, head=_HEADS, pool=_POOLS)
        check_activation(self.head_activation, field="head_activation")

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return self.embed_dim // self.num_heads

    def make_norm(self, rngs: nnx.Rngs) -> LayerNorm:
        """Return a norm of activations."""
        return norm_of(self, use_bias=self.norm_bias, rngs=rngs)


class _Block(Block):
    can_split_sequence = True

    def __init__(self, config: ModernBertConfig, kind: tuple[str, bool], *, rngs: nnx.Rngs):
        self.layer_type, is_first = kind
        super().__init__(
            attention_norm=None if is_first else config.make_norm(rngs),
            attention=attention_of(config, use_bias=config.attention_bias, rngs=rngs),
            mlp_norm=config.make_norm(rngs),
            mlp=mlp_of(config, is_gated=True, use_bias=config.mlp_bias, rngs=rngs),
            dropout=config.dropout,
        )
        self.config = config

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return self.attention(
            x_BTD,
            rotate=self.config.rotation(self.layer_type, x_BTD, batch),
            is_causal=False,
            **self.config.masks(self.layer_type, batch),
        )


class ModernBert(EncoderModel):
    """A text encoder with a head."""

    Config = ModernBertConfig
    stacks = ("encoder", "last_encoder")
    can_share_vocab = True
    can_split_sequence = True

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        self.token_embedding = config.make_table(embed, config.init_stddev, rngs)
        self.embedding_norm = config.make_norm(rngs)
        kinds = [(layer_type, number == 0) for number, layer_type in enumerate(config.types)]
        self.encoder, self.last_encoder = stacks_of(kinds, partial(_Block, config), rngs=rngs)
        self.final_norm = config.make_norm(rngs)

        biases = {"use_bias": config.head_bias, "norm_bias": config.norm_bias}
        head = {"activation": config.head_activation, **biases, "rngs": rngs}
        has_vocab_bias = config.head == "masked_lm" and config.vocab_bias
        self.dense_head = DenseHead(config, embed, **head) if config.head != "none" else None
        self.vocab_bias = config.make_bias(rngs) if has_vocab_bias else None
        labels = {"_out": config.num_labels}
        options = {"stddev": config.init_stddev, "rngs": rngs}
        has_labels = config.head in ("sequence", "token")
        self.classifier = Linear({"embed": embed}, labels, **options) if has_labels else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = self.embedding_norm(lookup(self.token_embedding[...], batch["tokens"]))
        return dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))

    def apply_last_norm(self, x_BTD: jax.Array) -> jax.Array:
        """Return the output of the last norm."""
        return self.final_norm(x_BTD)

    def vocab_features(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return activations `[B, T, D]`, and the bias of the logits."""
        assert self.dense_head is not None
        return self.dense_head(x_BTD), None if self.vocab_bias is None else self.vocab_bias[...]

    def label_features(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return `[B, D]` for the head "sequence", else `[B, T, D]`."""
        assert self.dense_head is not None
        x = x_BTD
        if self.config.head == "sequence":
            is_mean = self.config.pool == "mean"
            x = _mean_of_tokens(x_BTD, batch) if is_mean else x_BTD[:, 0]
        return self.dense_head(x)


def _mean_of_tokens(x_BTD: jax.Array, batch: dict) -> jax.Array:
    """Return the mean of all tokens but padding, `[B, D]`."""
    if "segment_ids" not in batch:
        return sum_over_tokens(jnp.sum(x_BTD, axis=1)) / whole_length(x_BTD.shape[1])
    is_token_BT1 = (batch["segment_ids"] != 0)[..., None]
    num_tokens = sum_over_tokens(jnp.sum(is_token_BT1.astype(x_BTD.dtype), axis=1))
    total_BD = sum_over_tokens(jnp.sum(jnp.where(is_token_BT1, x_BTD, 0), axis=1))
    return total_BD / jnp.maximum(num_tokens, 1)
