"""An example of your own model, which mixes each token with a gated mean of the tokens up to it.

The model names the logical axes of its tensors, and knows nothing else about meshes. To train it:

    python -m train.main --config=docs/examples/gated_mean_config.py --workdir=runs/gated_mean

`docs/own_parts.md` prints this file and explains it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import LayerNorm, Linear, lookup, param
from models.layers.dropout import dropout
from models.losses import chunked_vocab_loss
from models.stack import Stack
from sharding.logical import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMeanConfig:
    """The fields of the config section `model`."""

    vocab_size: int  # taken from the tokenizer if the config does not set it
    num_layers: int
    embed_dim: int
    dropout: float


class Block(nnx.Module):
    """One layer: a norm, a running mean over the sequence, a gate, and a residual connection."""

    def __init__(self, config: GatedMeanConfig, *, rngs: nnx.Rngs):
        embed = {"embed": config.embed_dim}
        mlp = {"mlp": 2 * config.embed_dim}
        self.norm = LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.up = Linear(embed, mlp, stddev=0.02, rngs=rngs)
        self.gate = Linear(embed, mlp, stddev=0.02, rngs=rngs)
        self.down = Linear(mlp, embed, stddev=0.02, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x, batch, keys):
        """Apply the block to x float[B, T, D]; keys are one dropout key per example, or None."""
        y = self.norm(x)
        h = constrain(self.up(y), "batch", "seq", "mlp")
        count = jnp.arange(1, h.shape[1] + 1, dtype=h.dtype)[None, :, None]
        mixed = jnp.cumsum(h, axis=1) / count * jax.nn.silu(self.gate(y))
        return x + dropout(self.down(mixed), self.dropout, keys)


class GatedMean(nnx.Module):
    """A language model: embed, a stack of blocks, and a head that shares the embedding table."""

    Config = GatedMeanConfig
    can_share_vocab = True  # because it uses lookup and chunked_vocab_loss

    def __init__(self, config: GatedMeanConfig, *, rngs: nnx.Rngs):
        shape = (-(-config.vocab_size // 128) * 128, config.embed_dim)
        normal = jax.nn.initializers.normal(0.02)
        self.table = param(normal, rngs, shape, ("vocab", "embed"))
        self.blocks = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.norm = LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.vocab_size = config.vocab_size

    def embed(self, batch):
        """Embed the tokens: float[B, T, D]."""
        return constrain(lookup(self.table[...], batch["tokens"]), "batch", "seq", "act_embed")

    def head(self, x, batch):
        """Return the sums of losses and of weights over the batch, and no other metrics."""
        x = self.norm(x).reshape(-1, x.shape[-1])
        targets = batch["targets"].reshape(-1)
        weights = batch["weights"].reshape(-1)
        table = self.table[...]
        size = self.vocab_size
        loss = chunked_vocab_loss(x, table, targets, weights, vocab_size=size)
        return loss, weights.sum(), {}
