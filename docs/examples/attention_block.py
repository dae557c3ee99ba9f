"""An example of your own block with Taibai's attention: a parallel block with rotary positions.

Attention and the feed-forward network read the same norm, and both are added to the residual. The
rest of the model is the one of docs/examples/gated_mean.py. To train it, add this to its command:

    --config.model.name=docs.examples.attention_block:ParallelModel --config.model.num_heads=4

`docs/own_parts.md` prints this file.
"""

import dataclasses

import numpy as np
from flax import nnx

from docs.examples.gated_mean import GatedMean, GatedMeanConfig
from models.layers.basic import LayerNorm
from models.layers.dropout import dropout
from models.layers.masks import segments
from models.layers.rope import rotate
from models.layers.transformer import MLP, Attention
from models.stack import Stack
from models.text.common import positions_by_index


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(GatedMeanConfig):
    """The fields of the config section `model`."""

    num_heads: int


class ParallelBlock(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    can_split_sequence = True  # mesh.context: nothing but attention reads other positions

    def __init__(self, config: ParallelConfig, *, rngs: nnx.Rngs):
        embed = config.embed_dim
        heads = config.num_heads
        head_dim = embed // heads
        init = {"use_bias": False, "rngs": rngs}
        self.norm = LayerNorm(embed, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(embed, heads, head_dim, stddevs=(0.02, 0.02, 0.02), **init)
        self.mlp = MLP(embed, 4 * embed, activation="gelu", stddevs=(0.02, 0.02), **init)
        self.head_dim = head_dim
        self.dropout = config.dropout

    def __call__(self, x, batch, keys):
        """Apply the block to x float[B, T, D]; keys are one dropout key per example, or None."""
        y = self.norm(x)
        positions = positions_by_index(batch)
        frequencies = 10_000.0 ** -np.linspace(0, 1, self.head_dim // 2, endpoint=False)

        def rotary(q_or_k):
            return rotate(q_or_k, positions, frequencies, factor=1.0)

        mixed = self.attention(y, rotate=rotary, is_causal=True, segments=segments(batch))
        return x + dropout(mixed + self.mlp(y), self.dropout, keys)


class ParallelModel(GatedMean):
    """The language model of gated_mean.py with these blocks."""

    Config = ParallelConfig
    can_split_sequence = True  # embed adds the positions of this device's tokens

    def __init__(self, config: ParallelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)

        def block(rngs):
            return ParallelBlock(config, rngs=rngs)

        self.blocks = Stack(block, config.num_layers, rngs=rngs)
