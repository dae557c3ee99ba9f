"""The model of this project: a decoder with a learned gate for each channel of each branch.

Each block adds `gate * branch(norm(x))` to its input, for attention and for an MLP. The model names
the axes of its arrays, and knows nothing of meshes.

B batch, T seq, D embed.
"""

import dataclasses

import jax
from flax import nnx

from models.layers.basic import RMSNorm, lookup, param
from models.layers.masks import segments
from models.layers.transformer import MLP, Attention
from models.losses import VocabLogits
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import VocabConfig, learned_positions, positions_by_index


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyConfig(VocabConfig):
    """The keys of the config section `model`."""

    num_layers: int
    num_heads: int  # divides embed_dim
    embed_dim: int
    max_positions: int  # longest sequence; taken from the data if the config does not set it
    head: str = "lm"

    def __post_init__(self):
        super().__post_init__()
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} must divide model.embed_dim={self.embed_dim}"
            )


class GatedBlock(nnx.Module):
    """Attention and an MLP, each behind a norm and a gate."""

    can_split_sequence = True  # mesh.context: nothing but attention reads other positions

    def __init__(self, config: MyConfig, *, rngs: nnx.Rngs):
        size = config.embed_dim
        heads = (config.num_heads, size // config.num_heads)
        ones = jax.nn.initializers.ones
        options = {"use_bias": False, "rngs": rngs}
        self.attention_norm = RMSNorm(size, epsilon=1e-6, rngs=rngs)
        self.attention = Attention(size, *heads, stddevs=(0.02, 0.02, 0.02), **options)
        self.attention_gate = param(ones, rngs, (size,), ("embed",))
        self.mlp_norm = RMSNorm(size, epsilon=1e-6, rngs=rngs)
        self.mlp = MLP(size, 4 * size, activation="gelu", stddevs=(0.02, 0.02), **options)
        self.mlp_gate = param(ones, rngs, (size,), ("embed",))

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block; `keys` would be for dropout, which this model does not have."""
        y_BTD = self.attention_norm(x_BTD)
        y_BTD = self.attention(y_BTD, is_causal=True, segments=segments(batch))
        x_BTD += self.attention_gate[...] * y_BTD
        return x_BTD + self.mlp_gate[...] * self.mlp(self.mlp_norm(x_BTD))


class MyModel(CausalModel):
    """A language model that trains on any mesh and continues prompts."""

    Config = MyConfig
    can_share_vocab = True
    can_split_sequence = True  # mesh.context: nothing but attention reads other positions

    def __init__(self, config: MyConfig, *, rngs: nnx.Rngs):
        shape = (config.max_positions, config.embed_dim)
        normal = jax.nn.initializers.normal(0.02)
        self.token_embedding = config.make_table(config.embed_dim, 0.02, rngs)
        self.position_embedding = param(normal, rngs, shape, (None, "embed"))
        self.decoder = Stack(
            lambda rngs: GatedBlock(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.final_norm = RMSNorm(config.embed_dim, epsilon=1e-6, rngs=rngs)
        self.config = config

    def embed(self, batch: dict) -> jax.Array:
        """Return the activations before the first block, [B, T, D]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        return x_BTD + learned_positions(self.position_embedding[...], positions_by_index(batch))

    def outputs(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for the activations after the last block."""
        table_VD = self.token_embedding[...]
        return VocabLogits(self.final_norm(x_BTD), table_VD, vocab_size=self.config.vocab_size)
