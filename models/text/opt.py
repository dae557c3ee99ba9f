"""OPT: a decoder with learned positions, separate projections and a tied head.

The 350 M model applies norms after residual sums, and its token embedding is narrower than its
blocks.

B batch, T seq, D embed, V vocab.

Source: Zhang et al. 2022 (arXiv:2205.01068), table 1.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from models.layers.activations import check_activation
from models.layers.basic import LayerNorm, Linear, lookup, param
from models.layers.block import Block
from models.layers.transformer import MLP, Attention
from models.losses import make_token_loss
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import (
    check_head,
    check_heads_divide,
    check_sizes,
    learned_positions,
    padded_vocab,
    positions_by_count,
    segments,
)

#: Row of position 0 in the table of positions; padding uses the row before it.
_FIRST_POSITION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig:
    """Sizes and regularization of an OPT."""

    vocab_size: int  # number of tokens in the tokenizer's vocab
    max_positions: int  # longest sequence
    num_layers: int
    num_heads: int
    embed_dim: int  # width of the blocks
    mlp_dim: int
    dropout: float = 0.0  # rate for residual branches, in [0, 1)
    token_embed_dim: int | None = None  # width of embedding and head; embed_dim if None
    norm_first: bool = True  # norm before each branch, rather than after its sum with the residual
    activation: str = "relu"
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
    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs):
        embed = config.embed_dim
        stddev = config.init_stddev
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        shared: dict[str, Any] = {"use_bias": True, "rngs": rngs}
        heads = config.num_heads, embed // config.num_heads
        super().__init__(
            attention_norm=LayerNorm(embed, **norm),
            attention=Attention(embed, *heads, stddevs=(stddev, stddev, stddev), **shared),
            mlp_norm=LayerNorm(embed, **norm),
            mlp=MLP(
                embed,
                config.mlp_dim,
                activation=config.activation,
                stddevs=(stddev, stddev),
                **shared,
            ),
            norms="before" if config.norm_first else "after_sum",
            dropout=config.dropout,
        )

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return self.attention(x_BTD, is_causal=True, segments=segments(batch))


class OPT(CausalModel):
    """A causal language model."""

    Config = OPTConfig
    can_share_vocab = True

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        narrow = config.token_embed_dim or config.embed_dim
        normal = jax.nn.initializers.normal(config.init_stddev)
        vocab = padded_vocab(config.vocab_size, config.vocab_multiple)
        self.token_embedding = param(normal, rngs, (vocab, narrow), ("vocab", "embed"))
        rows = _FIRST_POSITION + config.max_positions
        self.position_embedding = param(normal, rngs, (rows, embed), (None, "embed"))

        def project(inputs: int, outputs: int) -> Linear | None:
            sizes = {"embed": inputs}, {"_embed": outputs}
            options = {"stddev": config.init_stddev, "use_bias": False, "rngs": rngs}
            return None if narrow == embed else Linear(*sizes, **options)

        self.project_in = project(narrow, embed)
        self.project_out = project(embed, narrow)
        self.decoder = Stack(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        self.final_norm = LayerNorm(embed, **norm) if config.norm_first else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        if self.project_in is not None:
            x_BTD = self.project_in(x_BTD)
        x_BTD += learned_positions(
            self.position_embedding[...], positions_by_count(batch), first=_FIRST_POSITION
        )
        return x_BTD

    def outputs(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the two factors of the logits, `[B, T, E]` and `[V, E]`; E token embed."""
        x_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        x_BTD = x_BTD if self.project_out is None else self.project_out(x_BTD)
        return x_BTD, self.token_embedding[...]
