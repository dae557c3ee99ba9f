"""Multi-token prediction (MTP): a causal model that also learns the tokens after the next.

At depth k = 1, 2, ..., D, a block predicts token i + k + 1 at token i, from the activations of the
depth before it and the embedding of token i + k:

    depth    reads                                          predicts
    0        tokens up to i: the model itself, h0           token i + 1
    1        h0 and the embedding of token i + 1            token i + 2
    2        h1 and the embedding of token i + 2            token i + 3

    hk = norm(block(joint · [norm(embedding), norm(h of depth k - 1)])),    h0 = final_norm(x)

All depths share the embedding and the output table with the model. Only the loss needs them: a
generation leaves them out.

The blocks are a stack of their own, `mtp`, after the model's other stacks, and not a part of the
head. So whatever is written once for all stacks holds for them: rematerialization, ZeRO, host
memory, experts, float8, adapters, FLOPs. Pipeline stages count them as last layers. The price is
that the activations of all depths travel together, `x` with h0 and `ahead` with D more arrays: an
entry of `ahead` is the embedding of token i + k before its block, and hk after it.

Targets move along the whole row, over the borders between devices of `context`. A prediction counts
if the token that it predicts is in the same row and segment.

B batch, T seq, D embed.

Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2; published weights have the norms in this
order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import Linear
from models.losses import VocabLogits
from models.text.common import vocab_loss
from models.text.mixture import MixtureBlock, MixtureModel, activations_of
from sharding.ops import sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTokenConfig:
    """Fields of the config of a model that may predict tokens after the next."""

    mtp_depths: int = 0  # tokens after the next that the model learns to predict, too
    mtp_loss: float = 0.1  # factor of the mean of their losses

    def check_multi_token(self) -> None:
        """Check these fields.

        Raises:
            ValueError: names fields, values and the rule that they violate.
        """
        if self.mtp_depths < 0:
            raise ValueError(f"model.mtp_depths={self.mtp_depths} must be 0 or positive")
        if not self.mtp_loss >= 0:
            raise ValueError(f"model.mtp_loss={self.mtp_loss} must be 0 or positive")
        head = self.head  # type: ignore[attr-defined]
        if self.mtp_depths and head == "none":
            raise ValueError(
                f"model.mtp_depths={self.mtp_depths} needs a loss, but model.head={head!r} has "
                "none; set model.mtp_depths=0"
            )


class MultiTokenBlock(MixtureBlock):
    """The block of a depth; a subclass has a `config`, and calls `add_joint`."""

    can_split_sequence = True

    def add_joint(self, config: Any, rngs: nnx.Rngs) -> None:
        """Add the layers that join activations and embeddings, and the norm of the output.

        Args:
            config: model's config.
            rngs: random keys for the initialization.
        """
        embed = config.embed_dim
        self.embedding_norm = config.make_norm(embed, rngs)
        self.hidden_norm = config.make_norm(embed, rngs)
        inputs, outputs = {"_joined": 2, "embed": embed}, {"_embed": embed}
        options = {"stddev": config.init_stddev, "use_bias": False, "rngs": rngs}
        self.joint = Linear(inputs, outputs, **options)
        self.output_norm = config.make_norm(embed, rngs)

    def __call__(self, x: dict, batch: dict, keys: jax.Array | None) -> dict:
        """Apply the block to its depth of `x`; arguments as in models/stack.py."""
        ahead = x["ahead"]
        depth = batch["layer"] - self.config.num_layers
        hidden_BTD = _choose(depth, (x["x"], *ahead[:-1]))
        embedding_BTD = _choose(depth, ahead)
        normal = self.embedding_norm(embedding_BTD), self.hidden_norm(hidden_BTD)
        x_BTD = self.joint(jnp.stack(normal, axis=2))
        of_block = {"x": x_BTD, **_report(x)} if "report" in x else x_BTD
        y: Any = super().__call__(of_block, batch, keys)
        h_BTD = self.output_norm(y["x"] if isinstance(y, dict) else y)
        is_last = len(ahead) == 1
        ahead = tuple(
            h_BTD if is_last else jnp.where(depth == number, h_BTD, each)
            for number, each in enumerate(ahead)
        )
        return {**x, **_report(y), "ahead": ahead}


class MultiTokenModel(MixtureModel):
    """A causal model that may predict tokens after the next.

    A subclass has a `config` of MultiTokenConfig, `final_norm`, and a stack `mtp` of
    `MultiTokenBlock`, which is None without such predictions.
    """

    config: Any
    final_norm: nnx.Module
    loss_stacks = ("mtp",)

    @property
    def can_share_vocab(self) -> bool:
        """Whether stages can divide the vocab; not if `before_mtp`, which one runs, reads it."""
        return self.config.mtp_depths == 0

    def logits_of(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for activations after the final norm."""
        raise NotImplementedError

    def before_mtp(self, x: Any, batch: dict) -> dict:
        """Apply the final norm, and add the embeddings of the tokens that each depth reads."""
        ahead = (
            self.embed_tokens({"tokens": _shifted(batch["tokens"], depth)})
            for depth in range(1, self.config.mtp_depths + 1)
        )
        normal_BTD = self.final_norm(activations_of(x))  # type: ignore[operator]
        return {"x": normal_BTD, "ahead": tuple(ahead), **_report(x)}

    def further_losses(self, x: Any, batch: dict) -> dict[str, jax.Array]:
        """Return the loss of the tokens after the next.

        As in the paper, it is divided by the number of next tokens: those at the end of a text,
        which have nothing to predict, count as 0.
        """
        config = self.config
        depths = config.mtp_depths
        if not depths:
            return {}
        total: Any = 0
        for depth, h_BTD in enumerate(x["ahead"], start=1):
            targets = _targets_ahead(batch, depth)
            total += vocab_loss(self.logits_of(h_BTD), targets, config.loss)[0]
        return {"mtp_loss": config.mtp_loss / depths * total}


def _shifted(x: jax.Array, count: int) -> jax.Array:
    """Return `x`, [B, T], with the value of the token that follows by `count`; 0 after the last."""
    whole = sequence.whole_rows(x)
    return sequence.local_tokens(jnp.pad(whole[:, count:], ((0, 0), (0, count))))


def _targets_ahead(batch: dict, depth: int) -> dict[str, jax.Array]:
    """Return `targets` and `weights` of the predictions at a depth, from 1."""
    weights_BT = _shifted(batch["weights"], depth)
    if "segment_ids" in batch:
        ids_BT = batch["segment_ids"]
        weights_BT = jnp.where(_shifted(ids_BT, depth) == ids_BT, weights_BT, 0)
    return {"targets": _shifted(batch["targets"], depth), "weights": weights_BT}


def _choose(number: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jax.lax.select_n(number, *arrays)


def _report(x: Any) -> dict[str, jax.Array]:
    return {"report": x["report"]} if isinstance(x, dict) and "report" in x else {}
