"""BERT, RoBERTa, DistilBERT, ELECTRA: an encoder with norms after residual sums, and heads.

In addition to the fields in models/text/encoder.py, a batch has `token_types`, int32[B, T], if its
rows are pairs of texts.

B batch, T seq, D embed, E token embed, V vocab, C labels.

Source: Devlin et al. 2018 (arXiv:1810.04805), sections 3 and A.2; Liu et al. 2019
(arXiv:1907.11692), section 3; Sanh et al. 2019 (arXiv:1910.01108), section 3; Clark et al. 2020
(arXiv:2003.10555), section 2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.field_checks import check_choices
from models.layers.activations import ACTIVATIONS, check_activation
from models.layers.basic import LayerNorm, Linear, lookup, param
from models.layers.block import PlainBlock
from models.layers.dropout import dropout
from models.stack import Stack
from models.text.common import (
    BlockConfig,
    VocabConfig,
    count_positions,
    learned_positions,
    positions_by_index,
)
from models.text.encoder import HEADS, DenseHead, EncoderModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(BlockConfig, VocabConfig):
    """Sizes, regularization and head of a BERT, RoBERTa, DistilBERT or ELECTRA."""

    max_positions: int  # longest sequence
    dropout: float = 0.0  # rate for embeddings, residual branches and classifiers, in [0, 1)
    token_embed_dim: int | None = None  # width of all embeddings; embed_dim if None
    head: str  # masked_lm | pretraining | sequence | token | replaced_token | none
    num_labels: int = 2  # for the heads "sequence" and "token"
    num_token_types: int = 2  # maximum number of texts per row; RoBERTa: 1; DistilBERT: 0, no types
    first_position: int = 0  # row of position 0 in the table of positions; RoBERTa: pad_id + 1
    pad_id: int | None = None  # RoBERTa: token that positions do not count
    use_pooler: bool = True  # whether head="none" keeps the pooler, which other heads read
    pooler_activation: str = "tanh"  # DistilBERT: relu; ELECTRA: gelu
    layer_norm_epsilon: float = 1e-12

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        check_choices(self, head=HEADS)
        check_activation(self.pooler_activation, field="pooler_activation")

    @property
    def embeddings_dim(self) -> int:
        """The width of all embeddings."""
        return self.token_embed_dim or self.embed_dim

    @property
    def has_pooler(self) -> bool:
        """Whether the model has a pooler, a dense layer on the first token's activations."""
        return self.head in ("pretraining", "sequence") or (self.head == "none" and self.use_pooler)

    def make_block(self, rngs: nnx.Rngs) -> PlainBlock:
        """Return a block of the encoder."""
        options = {"norms": "after_sum", "branches_first": True}
        return PlainBlock(self, is_causal=False, **options, rngs=rngs)


class MaskedLMHead(DenseHead):
    """A dense layer and norm before the token embedding turns activations into logits; a bias."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.embeddings_dim, activation=config.activation, rngs=rngs)
        self.bias = config.make_bias(rngs)


class ReplacedTokenHead(nnx.Module):
    """A dense layer, and a logit per token of whether another model replaced it."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        inputs = {"embed": config.embed_dim}
        options: dict[str, Any] = {"stddev": config.init_stddev, "rngs": rngs}
        self.dense = Linear(inputs, {"_embed": config.embed_dim}, **options)
        self.logit = Linear(inputs, {"_out": 1}, **options)
        self.activation = config.activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits `[B, T, 2]`, as of a classifier: 0 for tokens that are not replaced."""
        logits = self.logit(ACTIVATIONS[self.activation](self.dense(x_BTD)))
        return jnp.pad(logits, ((0, 0), (0, 0), (1, 0)))


class Bert(EncoderModel):
    """A text encoder with a head."""

    Config = BertConfig
    can_share_vocab = True
    can_split_sequence = True

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        narrow = config.embeddings_dim
        stddev = config.init_stddev
        normal = jax.nn.initializers.normal(stddev)
        rows = config.first_position + config.max_positions
        self.token_embedding = config.make_table(narrow, stddev, rngs)
        self.position_embedding = param(normal, rngs, (rows, narrow), (None, "embed"))
        types = (config.num_token_types, narrow)
        has_types = config.num_token_types > 0
        self.type_embedding = param(normal, rngs, types, (None, "embed")) if has_types else None
        self.embedding_norm = LayerNorm(narrow, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.encoder = Stack(config.make_block, config.num_layers, rngs=rngs)

        def linear(outputs: int, inputs: int = embed) -> Linear:
            return Linear({"embed": inputs}, {"_out": outputs}, stddev=stddev, rngs=rngs)

        has_mlm = config.head in ("masked_lm", "pretraining")
        num_labels = {"pretraining": 2, "sequence": config.num_labels, "token": config.num_labels}
        labels = num_labels.get(config.head)
        replaces = config.head == "replaced_token"
        self.project_in = linear(embed, inputs=narrow) if narrow != embed else None
        self.replaced_token = ReplacedTokenHead(config, rngs=rngs) if replaces else None
        self.masked_lm = MaskedLMHead(config, rngs=rngs) if has_mlm else None
        self.pooler = linear(embed) if config.has_pooler else None
        self.classifier = linear(labels) if labels else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        config = self.config
        tokens = batch["tokens"]
        x_BTD = lookup(self.token_embedding[...], tokens)
        x_BTD += learned_positions(
            self.position_embedding[...], self._positions(batch), first=config.first_position
        )
        if self.type_embedding is not None:
            types = batch.get("token_types", jnp.zeros((1, 1), jnp.int32))
            x_BTD += self.type_embedding[...][types]
        x_BTD = dropout(self.embedding_norm(x_BTD), config.dropout, batch.get("dropout_keys"))
        return x_BTD if self.project_in is None else self.project_in(x_BTD)

    def vocab_features(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return activations `[B, T, E]`, and the bias of the logits."""
        assert self.masked_lm is not None
        return self.masked_lm(x_BTD), self.masked_lm.bias[...]

    def label_features(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return the output of the pooler `[B, D]`, or `x_BTD` if there is none."""
        if self.pooler is None:
            return x_BTD
        return ACTIVATIONS[self.config.pooler_activation](self.pooler(x_BTD[:, 0]))

    def label_logits(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return logits `[B, C]` or `[B, T, C]`."""
        if self.replaced_token is not None:
            return self.replaced_token(x_BTD)
        return super().label_logits(x_BTD, batch)

    def _positions(self, batch: dict) -> jax.Array:
        if self.config.pad_id is None or "positions" in batch:
            return positions_by_index(batch)
        return count_positions(batch["tokens"] != self.config.pad_id)
