"""GPT-2, and the sizes of GPT-3: a pre-norm decoder with learned positions and a tied head.

B batch, T seq, D embed, N heads, H head_dim, V vocab.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3;
Brown et al. 2020 (arXiv:2005.14165), table 2.1.
"""

import dataclasses
import math

import jax
from flax import nnx

from models.field_checks import check_choices
from models.layers.basic import lookup, param
from models.layers.block import Block, mlp_of, norm_of, scaled
from models.layers.dropout import dropout
from models.layers.masks import segments
from models.layers.transformer import FusedQKVAttention
from models.losses import VocabLogits
from models.scaling import ScalingConfig
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import (
    CAUSAL_HEADS,
    BlockConfig,
    VocabConfig,
    learned_positions,
    positions_by_index,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(BlockConfig, ScalingConfig, VocabConfig):
    """Sizes and regularization of a GPT-2."""

    max_positions: int  # longest sequence
    dropout: float = 0.0  # rate for embeddings and residual branches, in [0, 1)
    mlp_dim: int | None = None  # 4 × embed_dim if None
    activation: str = "gelu_tanh"
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        self.check_scaling()
        check_choices(self, head=CAUSAL_HEADS)


class _Block(Block):
    can_split_sequence = True

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        # Smaller for layers that write to the residual stream. `branch_scale` makes a deeper
        # model's contributions as small as they need to be, so these are the base model's.
        stddev = config.hidden_stddev
        stddevs = stddev, stddev / math.sqrt(2 * (config.base_num_layers or config.num_layers))
        heads = config.num_heads, config.embed_dim // config.num_heads
        super().__init__(
            attention_norm=norm_of(config, rngs=rngs),
            attention=FusedQKVAttention(config.embed_dim, *heads, stddevs=stddevs, rngs=rngs),
            mlp_norm=norm_of(config, rngs=rngs),
            mlp=mlp_of(config, stddevs=stddevs, rngs=rngs),
            dropout=config.dropout,
            scale=config.branch_scale,
        )
        self.score_scale = config.scaled_scores(heads[1])

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return self.attention(x_BTD, segments(batch), self.score_scale)


class GPT2(CausalModel):
    """A causal language model."""

    Config = GPT2Config
    can_share_vocab = True
    can_split_sequence = True

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(config.init_stddev)
        positions = (config.max_positions, config.embed_dim)
        self.token_embedding = config.make_table(config.embed_dim, config.init_stddev, rngs)
        self.position_embedding = param(normal, rngs, positions, (None, "embed"))
        self.decoder = Stack(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.final_norm = norm_of(config, rngs=rngs)
        self.config = config

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        x_BTD += learned_positions(self.position_embedding[...], positions_by_index(batch))
        return dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))

    def outputs(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for the activations after the last block."""
        table_VD = self.token_embedding[...]
        normal_BTD = scaled(self.final_norm(x_BTD), self.config.readout_scale)
        return VocabLogits(normal_BTD, table_VD, vocab_size=self.config.vocab_size)
