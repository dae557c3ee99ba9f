"""OPT: a decoder with learned positions, separate projections and a tied head.

The 350 M model applies norms after residual sums, and its token embedding is narrower than its
blocks.

B batch, T seq, D embed, V vocab.

Source: Zhang et al. 2022 (arXiv:2205.01068), table 1.
"""

import dataclasses

import jax
from flax import nnx

from models.flops import attention_flops, dense_flops
from models.layers.activations import check_activation
from models.layers.basic import LayerNorm, Linear, lookup, param
from models.layers.dropout import dropout
from models.layers.transformer import MLP, Attention
from models.losses import make_token_loss
from models.stack import Stack
from models.text.common import (
    check_head,
    check_heads_divide,
    check_sizes,
    learned_positions,
    next_token_loss,
    padded_vocab,
    positions_by_count,
    segments,
    text_batch,
    vocab_logits,
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


class Block(nnx.Module):
    """Attention and MLP, each with a residual sum and a norm before or after it."""

    can_split_tokens = True

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs):
        embed = config.embed_dim
        stddev = config.init_stddev
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        self.attention_norm = LayerNorm(embed, **norm)
        self.attention = Attention(
            embed,
            config.num_heads,
            embed // config.num_heads,
            use_bias=True,
            stddevs=(stddev, stddev, stddev),
            rngs=rngs,
        )
        self.mlp_norm = LayerNorm(embed, **norm)
        self.mlp = MLP(
            embed,
            config.mlp_dim,
            activation=config.activation,
            use_bias=True,
            stddevs=(stddev, stddev),
            rngs=rngs,
        )
        self.dropout = config.dropout
        self.norm_first = config.norm_first

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block to `x_BTD`; arguments as in models/stack.py."""

        def attention(x_BTD):
            branch = self.attention(x_BTD, is_causal=True, segments=segments(batch))
            return dropout(branch, self.dropout, keys, site=0)

        def mlp(x_BTD):
            return dropout(self.mlp(x_BTD), self.dropout, keys, site=1)

        if self.norm_first:
            x_BTD += attention(self.attention_norm(x_BTD))
            x_BTD += mlp(self.mlp_norm(x_BTD))
        else:
            x_BTD = self.attention_norm(x_BTD + attention(x_BTD))
            x_BTD = self.mlp_norm(x_BTD + mlp(x_BTD))
        return x_BTD


class OPT(nnx.Module):
    """A causal language model."""

    Config = OPTConfig
    can_share_vocab = True
    can_split_sequence = True
    objectives = ("causal_lm", "chat", "preference")

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
        self.decoder = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)
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

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted token losses, sum of weights, no further metrics)."""
        return next_token_loss(self.config, self.outputs(x_BTD), batch)

    def outputs(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the two factors of the logits, given the activations after the last block.

        Returns:
            Activations `[B, T, E]`, E token embed, and the output embedding `[V, E]`.
        """
        x_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        x_BTD = x_BTD if self.project_out is None else self.project_out(x_BTD)
        return x_BTD, self.token_embedding[...]

    def forward_flops(self, shapes: dict) -> int:
        """Return the matrix-product FLOPs of a batch's forward pass; see models/flops.py."""
        config = self.config
        embed = self.config.embed_dim
        batch, length = shapes["tokens"].shape
        kernels = 4 * dense_flops(embed, embed) + 2 * dense_flops(embed, config.mlp_dim)
        head_dim = embed // config.num_heads
        scores = attention_flops(length, config.num_heads, head_dim, is_causal=True)
        narrow = config.token_embed_dim or embed
        ends = dense_flops(narrow, config.vocab_size)
        ends += 0 if self.project_in is None else 2 * dense_flops(narrow, embed)
        return batch * length * (config.num_layers * (kernels + scores) + ends)

    def __call__(self, tokens: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Return logits, or activations for `head="none"`.

        Args:
            tokens: int32[B, T].
            attention_mask: [B, T], 0 for padding; None for no padding.

        Returns:
            Logits float32[B, T, V], V without padding, or activations `[B, T, D]`.
        """
        batch = text_batch(tokens, attention_mask, vocab_size=self.config.vocab_size)
        x_BTD = self.decoder(self.embed(batch), batch)
        return self.outputs(x_BTD)[0] if self.config.head == "none" else self.logits(x_BTD)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits float32[B, T, V] for the activations after the last block."""
        return vocab_logits(*self.outputs(x_BTD), vocab_size=self.config.vocab_size)
