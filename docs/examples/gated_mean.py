"""A model of one's own: each token mixes with a gated running mean of those before it.

It names the logical axes of its tensors, and that is all it knows of meshes.

    python -m train.main --config=docs/examples/gated_mean_config.py --workdir=runs/gated_mean
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import LayerNorm, Linear, dropout, lookup, param
from models.losses import chunked_vocab_loss
from models.stack import Stack
from sharding.logical import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMeanConfig:
    vocab_size: int  # taken from the tokenizer when the config leaves it open
    num_layers: int
    embed_dim: int
    dropout: float


class Block(nnx.Module):
    def __init__(self, config: GatedMeanConfig, *, rngs: nnx.Rngs):
        embed, mlp = {"embed": config.embed_dim}, {"mlp": 2 * config.embed_dim}
        self.norm = LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.up = Linear(embed, mlp, stddev=0.02, rngs=rngs)
        self.gate = Linear(embed, mlp, stddev=0.02, rngs=rngs)
        self.down = Linear(mlp, embed, stddev=0.02, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x, batch, keys):
        y = self.norm(x)
        h = constrain(self.up(y), "batch", "seq", "mlp")
        count = jnp.arange(1, h.shape[1] + 1, dtype=h.dtype)[None, :, None]
        mixed = jnp.cumsum(h, axis=1) / count * jax.nn.silu(self.gate(y))
        return x + dropout(self.down(mixed), self.dropout, keys)


class GatedMean(nnx.Module):
    Config = GatedMeanConfig
    can_share_vocab = True  # by lookup and chunked_vocab_loss

    def __init__(self, config: GatedMeanConfig, *, rngs: nnx.Rngs):
        shape = (-(-config.vocab_size // 128) * 128, config.embed_dim)
        normal = jax.nn.initializers.normal(0.02)
        self.table = param(normal, rngs, shape, ("vocab", "embed"))
        self.blocks = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.norm = LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.vocab_size = config.vocab_size

    def embed(self, batch):
        return constrain(lookup(self.table[...], batch["tokens"]), "batch", "seq", "act_embed")

    def head(self, x, batch):
        x = self.norm(x).reshape(-1, x.shape[-1])
        targets, weights = batch["targets"].reshape(-1), batch["weights"].reshape(-1)
        table, size = self.table[...], self.vocab_size
        loss = chunked_vocab_loss(x, table, targets, weights, vocab_size=size)
        return loss, weights.sum(), {}
