"""Shared parts of text models: batches, positions, and the head over the vocab.

The batch of a text model is a dict of

- `tokens`: int32[B, T].
- `targets`: int32[B, T], and `weights`: float32[B, T], which are 0 for tokens without a target.
- `segment_ids`: int32[B, T], present if a row contains several texts or padding. Tokens only see
  tokens of their own segment, and padding is segment 0.
- `positions`: int32[B, T], present if they differ from the model's default positions.

B batch, T seq, D embed, V vocab.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from fields.numbers import MAX_LAYERS, number_problem, shown
from models.layers.activations import check_activation
from models.layers.basic import param
from models.losses import VocabLogits, make_token_loss
from sharding.ops import sequence
from sharding.ops.rows import rows_of

#: Values of `model.head` for causal language models; "none" gives activations.
CAUSAL_HEADS = ("lm", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabConfig:
    """The vocab of a text model, and the loss of its tokens."""

    vocab_size: int  # number of tokens in the tokenizer's vocab
    vocab_multiple: int = 128  # the vocab is padded to a multiple of this
    loss: str = "cross_entropy"  # of tokens; or an import path, see models/losses.py

    def __post_init__(self):
        check_sizes(self)
        make_token_loss(self.loss)

    def make_table(self, dim: int, stddev: float, rngs: nnx.Rngs) -> nnx.Param:
        """Return an embedding of tokens, or of the head."""
        shape = (padded_vocab(self.vocab_size, self.vocab_multiple), dim)
        return param(jax.nn.initializers.normal(stddev), rngs, shape, ("vocab", "embed"))

    def make_bias(self, rngs: nnx.Rngs) -> nnx.Param:
        """Return a bias of the logits."""
        shape = (padded_vocab(self.vocab_size, self.vocab_multiple),)
        return param(jax.nn.initializers.zeros, rngs, shape, ("vocab",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes of a `models.layers.block.PlainBlock`."""

    num_layers: int
    num_heads: int  # divides embed_dim
    embed_dim: int  # width of the blocks
    mlp_dim: int
    activation: str = "gelu"  # of the MLPs; see models/layers/activations.py
    layer_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02

    def check_blocks(self) -> None:
        """Check these fields, except for what `check_sizes` checks."""
        check_heads_divide(self)
        check_activation(self.activation)


def text_batch(
    tokens: jax.Array, attention_mask: jax.Array | None, *, vocab_size: int
) -> dict[str, jax.Array]:
    """Return the batch of int32[B, T] tokens; `attention_mask` [B, T] is 0 for padding.

    Raises:
        ValueError: see `check_token_ids`.
    """
    check_token_ids(tokens, vocab_size)
    if attention_mask is None:
        return {"tokens": tokens}
    return {"tokens": tokens, "segment_ids": attention_mask.astype(jnp.int32)}


def positions_by_index(batch: dict) -> jax.Array:
    """Return int32[B or 1, T]: the batch's positions, or else 0, 1, 2, ... along the row."""
    if "positions" in batch:
        return batch["positions"]
    return sequence.positions(batch["tokens"].shape[1])[None]


def positions_by_count(batch: dict) -> jax.Array:
    """Return int32[B or 1, T]: the batch's positions, or else the number of preceding tokens.

    Padding does not count, and has position -1.
    """
    if "positions" in batch or "segment_ids" not in batch:
        return positions_by_index(batch)
    return count_positions(batch["segment_ids"] != 0)


def count_positions(is_token: jax.Array) -> jax.Array:
    """Return int32[B, T], the number of preceding tokens or -1 for padding, from bool[B, T]."""
    is_token = is_token.astype(jnp.int32)
    up_to = sequence.local_tokens(jnp.cumsum(sequence.whole_rows(is_token), axis=1))
    return up_to * is_token - 1


def check_token_ids(tokens: jax.Array, vocab_size: int) -> None:
    """Check token ids that a model is called with; ids that are being traced are not known yet.

    Raises:
        ValueError: if an id is not in the vocabulary. JAX would read another row of the table.
    """
    is_known = not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True)
    if not (is_known and tokens.size):
        return
    ids = np.asarray(tokens)  # in NumPy, because jax.Array.min would be traced within jax.jit
    for bound in (int(ids.min()), int(ids.max())):
        if not 0 <= bound < vocab_size:
            raise ValueError(
                f"token id {bound} is not in the vocabulary, whose ids are 0 to {vocab_size - 1}; "
                "use the tokenizer of the model"
            )


def learned_positions(table_PD: jax.Array, positions: jax.Array, *, first: int = 0) -> jax.Array:
    """Return the embeddings of positions, `[*positions, D]`.

    Args:
        table_PD: one embedding per position.
        positions: int32[B or 1, T].
        first: row of position 0 in the table.

    Raises:
        ValueError: if the sequence is longer than the table.
    """
    length = sequence.whole_length(positions.shape[-1])
    rows = table_PD.shape[0] - first
    if length > rows:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the model's {rows} positions; shorten "
            "the sequence"
        )
    return rows_of(table_PD, positions + first)


def vocab_loss(logits: VocabLogits, batch: dict, loss: str) -> tuple[jax.Array, jax.Array]:
    """Return (sum of the weighted losses of `targets`, sum of `weights`).

    Args:
        logits: logits of all tokens.
        batch: has `targets` and `weights`.
        loss: as for `models.losses.make_token_loss`.
    """
    total = logits.loss(batch["targets"], batch["weights"], make_token_loss(loss))
    return total, jnp.sum(batch["weights"], dtype=total.dtype)


def check_heads_divide(config: Any, *, prefix: str = "") -> None:
    """Raise a ValueError unless the number of heads divides the embedding dim.

    Args:
        config: has the fields `num_heads` and `embed_dim`.
        prefix: prefix of the names of both fields.
    """
    heads, embed = (getattr(config, f"{prefix}{name}") for name in ("num_heads", "embed_dim"))
    if embed % heads:
        raise ValueError(
            f"model.{prefix}num_heads={heads} must divide model.{prefix}embed_dim={embed}"
        )


def check_has_loss(config: Any) -> None:
    """Raise a ValueError if the model's head does not compute a loss."""
    if config.head == "none":
        raise ValueError("model.head='none' gives activations and no loss; choose another head")


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """Return the rows of an embedding whose vocab is padded to a multiple, so that it shards."""
    return -(-vocab_size // multiple) * multiple


def check_sizes(config: Any) -> None:
    """Check the fields of a model's config that are counts, sizes or rates.

    Args:
        config: dataclass; its fields that are tuples are not checked.

    Raises:
        ValueError: if `num_*`, `decoder_num_*`, `*_dim`, `*_size`, `max_*` or `vocab_multiple` is
            less than 1, if `*_layers` is more than MAX_LAYERS, if `dropout`, `drop_path` or
            `*_smoothing` is not in [0, 1), if `init_stddev` is negative, if `*_epsilon` is not
            positive, if `*_theta` is at most 1, or if any number is outside the range of
            `fields.numbers`.
    """
    for field in dataclasses.fields(config):
        name = field.name
        value: Any = getattr(config, name)
        if problem := number_problem(value):
            raise ValueError(f"model.{name}={shown(value)} {problem}")
        if value is None or isinstance(value, tuple):
            continue
        kind = name.removeprefix("decoder_")
        is_size = kind.endswith(("_dim", "_size", "_multiple")) or kind.startswith(("num_", "max_"))
        if is_size and value < (least := 0 if name == "num_token_types" else 1):
            raise ValueError(f"model.{name}={value} must be at least {least}")
        if is_size and name.endswith("_layers") and value > MAX_LAYERS:
            raise ValueError(
                f"model.{name}={value} must be at most {MAX_LAYERS}; choose fewer layers"
            )
        if name.endswith(("dropout", "drop_path", "smoothing")) and not (0.0 <= value < 1.0):
            raise ValueError(f"model.{name}={value} must be in [0, 1)")
        if name == "init_stddev" and not value >= 0:
            raise ValueError(f"model.{name}={value} must be 0 or positive")
        if name.endswith("_epsilon") and not value > 0:
            raise ValueError(f"model.{name}={value} must be positive")
        if name.endswith("_theta") and not value > 1:
            raise ValueError(f"model.{name}={value} must be more than 1")
