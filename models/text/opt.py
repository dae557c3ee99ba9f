"""OPT: a decoder with learned positions, separate projections and a tied head.

The 350 M model applies norms after residual sums, and its token embedding is narrower than its
blocks.

B batch, T seq, D embed, V vocab.

Source: Zhang et al. 2022 (arXiv:2205.01068), table 1.
"""

import dataclasses

import jax
from flax import nnx

from models.layers.basic import Linear, lookup, param
from models.layers.block import PlainBlock, norm_of
from models.losses import VocabLogits
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import (
    BlockConfig,
    VocabConfig,
    check_head,
    learned_positions,
    positions_by_count,
)

#: Row of position 0 in the table of positions; padding uses the row before it.
_FIRST_POSITION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(BlockConfig, VocabConfig):
    """Sizes and regularization of an OPT."""

    max_positions: int  # longest sequence
    dropout: float = 0.0  # rate for residual branches, in [0, 1)
    token_embed_dim: int | None = None  # width of embedding and head; embed_dim if None
    norm_first: bool = True  # norm before each branch, rather than after its sum with the residual
    activation: str = "relu"
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        check_head(self.head)

    def make_block(self, rngs: nnx.Rngs) -> PlainBlock:
        """Return a block of the decoder."""
        norms = "before" if self.norm_first else "after_sum"
        return PlainBlock(self, is_causal=True, norms=norms, rngs=rngs)


class OPT(CausalModel):
    """A causal language model."""

    Config = OPTConfig
    can_share_vocab = True

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        narrow = config.token_embed_dim or config.embed_dim
        normal = jax.nn.initializers.normal(config.init_stddev)
        self.token_embedding = config.make_table(narrow, config.init_stddev, rngs)
        rows = _FIRST_POSITION + config.max_positions
        self.position_embedding = param(normal, rngs, (rows, embed), (None, "embed"))

        def project(inputs: int, outputs: int) -> Linear | None:
            sizes = {"embed": inputs}, {"_embed": outputs}
            options = {"stddev": config.init_stddev, "use_bias": False, "rngs": rngs}
            return None if narrow == embed else Linear(*sizes, **options)

        self.project_in = project(narrow, embed)
        self.project_out = project(embed, narrow)
        self.decoder = Stack(config.make_block, config.num_layers, rngs=rngs)
        self.final_norm = norm_of(config, rngs=rngs) if config.norm_first else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        if self.project_in is not None:
            x_BTD = self.project_in(x_BTD)
        positions = positions_by_count(batch)
        table_PD = self.position_embedding[...]
        return x_BTD + learned_positions(table_PD, positions, first=_FIRST_POSITION)

    def outputs(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for the activations after the last block."""
        x_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        x_BTD = x_BTD if self.project_out is None else self.project_out(x_BTD)
        table_VD = self.token_embedding[...]
        return VocabLogits(x_BTD, table_VD, vocab_size=self.config.vocab_size)
