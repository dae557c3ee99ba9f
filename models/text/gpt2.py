"""GPT-2, and the sizes of GPT-3: a pre-norm decoder with learned positions and a tied head.

B batch, T seq, D embed, N heads, H head_dim, V vocab.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3;
Brown et al. 2020 (arXiv:2005.14165), table 2.1.
"""

import dataclasses
import math

import jax
from flax import nnx

from models.layers.activations import check_activation
from models.layers.basic import LayerNorm, lookup, param
from models.layers.block import Block
from models.layers.dropout import dropout
from models.layers.transformer import MLP, FusedQKVAttention
from models.losses import make_token_loss
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import (
    check_head,
    check_heads_divide,
    check_sizes,
    learned_positions,
    padded_vocab,
    positions_by_index,
    segments,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes and regularization of a GPT-2."""

    vocab_size: int  # number of tokens in the tokenizer's vocab
    max_positions: int  # longest sequence
    num_layers: int
    num_heads: int
    embed_dim: int
    dropout: float = 0.0  # rate for embeddings and residual branches, in [0, 1)
    mlp_dim: int | None = None  # 4 × embed_dim if None
    activation: str = "gelu_tanh"  # activation of the MLP; see models/layers/activations.py
    vocab_multiple: int = 128  # the vocab is padded to a multiple of this
    layer_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02
    loss: str = "cross_entropy"  # or an import path; see models/losses.py
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        check_sizes(self)
        check_heads_divide(self)
        check_activation(self.activation)
        make_token_loss(self.loss)
        check_head(self.head)


class _Block(Block):
    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        embed = config.embed_dim
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        stddevs = config.init_stddev, _residual_stddev(config)
        heads = config.num_heads, embed // config.num_heads
        super().__init__(
            attention_norm=LayerNorm(embed, **norm),
            attention=FusedQKVAttention(embed, *heads, stddevs=stddevs, rngs=rngs),
            mlp_norm=LayerNorm(embed, **norm),
            mlp=MLP(
                embed,
                config.mlp_dim or 4 * embed,
                activation=config.activation,
                use_bias=True,
                stddevs=stddevs,
                rngs=rngs,
            ),
            dropout=config.dropout,
        )

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return self.attention(x_BTD, segments(batch))


class GPT2(CausalModel):
    """A causal language model."""

    Config = GPT2Config
    can_share_vocab = True

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(config.init_stddev)
        embed = config.embed_dim
        vocab = padded_vocab(config.vocab_size, config.vocab_multiple)
        self.token_embedding = param(normal, rngs, (vocab, embed), ("vocab", "embed"))
        self.position_embedding = param(
            normal, rngs, (config.max_positions, embed), (None, "embed")
        )
        self.decoder = Stack(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.final_norm = LayerNorm(embed, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.config = config

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        x_BTD += learned_positions(self.position_embedding[...], positions_by_index(batch))
        x_BTD = dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))
        return x_BTD

    def outputs(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the two factors of the logits, `[B, T, D]` and `[V, D]`."""
        return self.final_norm(x_BTD), self.token_embedding[...]


def _residual_stddev(config: GPT2Config) -> float:
    """Return GPT-2's smaller initial deviation of layers that write to the residual stream."""
    return config.init_stddev / math.sqrt(2 * config.num_layers)
