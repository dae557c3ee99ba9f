"""GPT-2, and GPT-3's sizes: a pre-norm decoder with learned positions and a tied head.

B batch, T seq, D embed, N heads, H head_dim, V vocab.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3;
Brown et al. 2020 (arXiv:2005.14165), table 2.1.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import attend
from models.flops import attention_flops, dense_flops
from models.layers import LayerNorm, Linear, dropout, linear_after, lookup, param
from models.losses import chunked_vocab_loss, make_token_loss
from models.stack import Stack
from sharding.logical import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes and regularisation of a GPT-2."""

    vocab_size: int  # tokens that the tokenizer knows
    max_positions: int  # longest sequence
    num_layers: int
    num_heads: int
    embed_dim: int
    dropout: float  # of embeddings and residual branches, in [0, 1)
    vocab_multiple: int = 128  # the vocab is padded to a multiple of this
    layer_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02
    loss: str = "cross_entropy"  # or an import path; see models/losses.py

    def __post_init__(self):
        for name in ("vocab_size", "max_positions", "num_layers", "num_heads", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        if self.embed_dim < 1 or self.embed_dim % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} must divide model.embed_dim={self.embed_dim}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} must lie in [0, 1)")
        make_token_loss(self.loss)

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class Attention(nnx.Module):
    """Causal multi-head self-attention of norm(x)."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        embed = {"embed": config.embed_dim}
        heads = {"heads": config.num_heads, "head_dim": config.embed_dim // config.num_heads}
        self.qkv = Linear(embed, {"_qkv": 3, **heads}, stddev=config.init_stddev, rngs=rngs)
        self.out = Linear(heads, embed, stddev=_residual_stddev(config), rngs=rngs)

    def __call__(self, x_BTD: jax.Array, norm: LayerNorm) -> jax.Array:
        qkv = linear_after(norm, self.qkv, x_BTD)
        qkv = constrain(qkv, "batch", "seq", None, "heads", "head_dim")
        y_BTNH = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        return self.out(constrain(y_BTNH, "batch", "seq", "heads", "head_dim"))


class MLP(nnx.Module):
    """Two linear layers with the tanh form of gelu between them, applied to norm(x)."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        embed, mlp = {"embed": config.embed_dim}, {"mlp": 4 * config.embed_dim}
        self.up = Linear(embed, mlp, stddev=config.init_stddev, rngs=rngs)
        self.down = Linear(mlp, embed, stddev=_residual_stddev(config), rngs=rngs)

    def __call__(self, x_BTD: jax.Array, norm: LayerNorm) -> jax.Array:
        h_BTF = constrain(linear_after(norm, self.up, x_BTD), "batch", "seq", "mlp")
        return linear_after(jax.nn.gelu, self.down, h_BTF)  # the tanh form, by default


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        self.attention_norm = LayerNorm(config.embed_dim, **norm)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config.embed_dim, **norm)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        branch = self.attention(x_BTD, self.attention_norm)
        x_BTD = x_BTD + dropout(branch, self.dropout, keys, site=0)
        branch = self.mlp(x_BTD, self.mlp_norm)
        x_BTD = x_BTD + dropout(branch, self.dropout, keys, site=1)
        return constrain(x_BTD, "batch", "seq", "act_embed")


class GPT2(nnx.Module):
    """A causal language model."""

    Config = GPT2Config
    can_share_vocab = True

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(config.init_stddev)
        vocab, embed = config.padded_vocab_size, config.embed_dim
        self.token_embedding = param(normal, rngs, (vocab, embed), ("vocab", "embed"))
        self.position_embedding = param(
            normal, rngs, (config.max_positions, embed), (None, "embed")
        )
        self.decoder = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.final_norm = LayerNorm(embed, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.config = config

    def embed(self, batch: dict) -> jax.Array:
        """Returns activations `[B, T, D]` of `batch["tokens"]`, int32[B, T]."""
        tokens = batch["tokens"]
        positions = self.position_embedding[...][: tokens.shape[1]]
        x_BTD = lookup(self.token_embedding[...], tokens) + positions[None]
        x_BTD = dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))
        return constrain(x_BTD, "batch", "seq", "act_embed")

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Returns (sum of weighted token losses, sum of weights, no further metrics)."""
        x_BTD = self.final_norm(x_BTD)
        loss = chunked_vocab_loss(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            self.token_embedding[...],
            batch["targets"].reshape(-1),
            batch["weights"].reshape(-1),
            vocab_size=self.config.vocab_size,
            token_loss=make_token_loss(self.config.loss),
        )
        return loss, jnp.sum(batch["weights"], dtype=loss.dtype), {}

    def forward_flops_per_token(self, sequence_length: int) -> int:
        """Returns matrix-product FLOPs of one token's forward pass; see models/flops.py."""
        config, embed = self.config, self.config.embed_dim
        kernels = dense_flops(embed, 3 * embed) + dense_flops(embed, embed)
        kernels += 2 * dense_flops(embed, 4 * embed)
        heads, head_dim = config.num_heads, embed // config.num_heads
        scores = attention_flops(sequence_length, heads, head_dim, is_causal=True)
        return config.num_layers * (kernels + scores) + dense_flops(embed, config.vocab_size)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits, float32[B, T, V] (V without padding), of int32[B, T]."""
        batch = {"tokens": tokens}
        x_BTD = self.final_norm(self.decoder(self.embed(batch), batch))
        table = self.token_embedding[...][: self.config.vocab_size]
        return jnp.einsum("BTD,VD->BTV", x_BTD, table, preferred_element_type=jnp.float32)


def _residual_stddev(config: GPT2Config) -> float:
    """Returns GPT-2's smaller deviation for layers that write to the residual stream."""
    return config.init_stddev / math.sqrt(2 * config.num_layers)
