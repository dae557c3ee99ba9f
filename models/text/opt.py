"""OPT: a decoder with learned positions, separate projections and a tied head; CLIP's text encoder.

The 350 M model applies norms after residual sums, and its token embedding is narrower than its
blocks.

B batch, T seq, D embed, V vocab.

Source: Zhang et al. 2022 (arXiv:2205.01068), table 1; Radford et al. 2021 (arXiv:2103.00020),
section 2.4.
"""

import dataclasses

import jax
from flax import nnx

from models.field_checks import check_choices
from models.layers.basic import Linear, lookup, param
from models.layers.block import PlainBlock, norm_of
from models.losses import VocabLogits
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import (
    CAUSAL_HEADS,
    BlockConfig,
    VocabConfig,
    learned_positions,
    positions_by_count,
    positions_by_index,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(BlockConfig, VocabConfig):
    """Sizes and regularization of an OPT."""

    max_positions: int  # longest sequence
    dropout: float = 0.0  # rate for residual branches, in [0, 1)
    # row of position 0 in the table; padding has the row before it. 0, CLIP: padding counts, too
    first_position: int = 2
    projection_dim: int | None = None  # with head="none": size of a last projection, as in CLIP
    token_embed_dim: int | None = None  # width of embedding and head; embed_dim if None
    norm_first: bool = True  # norm before each branch, rather than after its sum with the residual
    activation: str = "relu"
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        check_choices(self, head=CAUSAL_HEADS)
        if self.first_position < 0 or (self.projection_dim and self.head != "none"):
            raise ValueError(
                f"model.first_position={self.first_position} must be at least 0, and "
                f"model.projection_dim={self.projection_dim} needs model.head='none', not "
                f"{self.head!r}; correct them, or leave both out"
            )

    def make_block(self, rngs: nnx.Rngs) -> PlainBlock:
        """Return a block of the decoder."""
        norms = "before" if self.norm_first else "after_sum"
        return PlainBlock(self, is_causal=True, norms=norms, rngs=rngs)


class OPT(CausalModel):
    """A causal language model."""

    Config = OPTConfig
    can_share_vocab = True
    can_split_sequence = True

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        narrow = config.token_embed_dim or config.embed_dim
        normal = jax.nn.initializers.normal(config.init_stddev)
        self.token_embedding = config.make_table(narrow, config.init_stddev, rngs)
        rows = config.first_position + config.max_positions
        self.position_embedding = param(normal, rngs, (rows, embed), (None, "embed"))

        def project(inputs: int, outputs: int) -> Linear:
            options = {"stddev": config.init_stddev, "use_bias": False, "rngs": rngs}
            return Linear({"embed": inputs}, {"_embed": outputs}, **options)

        is_narrow = narrow != embed
        outputs = config.projection_dim or (narrow if is_narrow else None)
        self.project_in = project(narrow, embed) if is_narrow else None
        self.project_out = project(embed, outputs) if outputs else None
        self.decoder = Stack(config.make_block, config.num_layers, rngs=rngs)
        self.final_norm = norm_of(config, rngs=rngs) if config.norm_first else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        if self.project_in is not None:
            x_BTD = self.project_in(x_BTD)
        first = self.config.first_position
        positions = positions_by_count(batch) if first else positions_by_index(batch)
        return x_BTD + learned_positions(self.position_embedding[...], positions, first=first)

    def outputs(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for the activations after the last block."""
        x_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        x_BTD = x_BTD if self.project_out is None else self.project_out(x_BTD)
        return VocabLogits(x_BTD, self.token_embedding[...], vocab_size=self.config.vocab_size)
