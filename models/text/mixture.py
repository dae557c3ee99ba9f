"""The base of models that may have experts: routers' reports, losses and metrics.

Between the blocks of such a causal model, activations are a dict of `x`, [B, T, D], and `report`,
[B, R]; see `models.layers.experts.RouterReport`. Without a loss, as in a generation, or without
experts, they are `x` alone.

B batch, T seq, D embed, V vocab.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.block import Block
from models.layers.experts import Experts, RouterReport, balance_changes
from models.layers.transformer import MLP
from models.stack import Stack, Sums
from models.text.causal import CausalModel


class Mixture(nnx.Module):
    """A model with routers, whose reports travel with its activations.

    A subclass has a `config` and stacks, whose blocks have experts or an MLP as `mlp`.
    """

    config: Any
    stacks: tuple[str, ...]

    @property
    def sees_whole_batch(self) -> bool:
        """Whether a loss balances the load of the whole batch; see models/stack.py."""
        return self.config.router_loss > 0 and self.config.router_loss_over == "batch"

    def first_report(self, x_BTD: jax.Array, batch: dict) -> dict[str, jax.Array]:
        """Return the entry of the activations for the report; none without experts or a loss."""
        if self.config.num_experts is None or "weights" not in batch:
            return {}
        return {"report": RouterReport(self.config).start(x_BTD)}

    def summed(
        self,
        losses: dict[str, jax.Array],
        weight: jax.Array,
        report_BR: jax.Array | None,
        batch: dict,
    ) -> tuple[Sums, Sums, dict]:
        """Return the result of a head, with the losses and metrics of the routers.

        Args:
            losses: name -> sum of weighted losses; one of them is `lm_loss`.
            weight: sum of the weights, of each of them.
            report_BR: report after the last layer; None without experts.
            batch: as for the head.
        """
        metrics = {}
        if report_BR is not None:
            router_loss, metrics = RouterReport(self.config).metrics(report_BR, batch["weights"])
            losses = losses if router_loss is None else {**losses, "router_loss": router_loss}
        if len(losses) == 1:
            return losses["lm_loss"], weight, metrics
        return losses, dict.fromkeys(losses, weight), metrics

    def after_update(self, sums: Mapping, layer_of_slot: Mapping[str, np.ndarray]) -> Mapping:
        """Return the changes of the balancing biases; see models/stack.py."""
        config = self.config
        if not config.balancing_rate:
            return {}
        layers = {}
        first = 0
        for name in self.stacks:
            stack: Stack | None = getattr(self, name)
            if stack is None:
                continue
            for place, path in enumerate(stack.block_paths):
                block: Any = getattr(stack.layers, path[0]) if path else stack.layers
                if isinstance(block.mlp, Experts):
                    numbers = np.maximum(layer_of_slot[name], 0) * stack.layers_per_block
                    numbers = config.numbers_with_experts[first + place + numbers]
                    layers[(name, "layers", *path, "mlp")] = numbers
            first += stack.num_layers * stack.layers_per_block
        return balance_changes(config, sums["expert_load"][0].sums, layers)


def added_report(
    report_BR: jax.Array, config: Any, mlp: Experts, is_token_BT: jax.Array, batch: dict
) -> jax.Array:
    """Return the report after a block with experts.

    Args:
        report_BR: report before it.
        config: model's config.
        mlp: experts, which have been called.
        is_token_BT: whether a token counts.
        batch: as for the block.
    """
    assert mlp.routing is not None
    return RouterReport(config).add(report_BR, mlp.routing, is_token_BT, batch["layer"])


class MixtureBlock(Block):
    """A block whose MLP may be `Experts`; a subclass has a `config`."""

    can_split_sequence = True

    config: Any

    def __call__(self, x: Any, batch: dict, keys: jax.Array | None) -> Any:
        """Apply the block to `x`; arguments as in models/stack.py."""
        if not isinstance(x, dict):
            return super().__call__(x, batch, keys)
        x_BTD = super().__call__(x["x"], batch, keys)
        report_BR = x["report"]
        if isinstance(self.mlp, Experts):
            is_token_BT = batch.get("segment_ids", jnp.ones_like(batch["tokens"])) != 0
            report_BR = added_report(report_BR, self.config, self.mlp, is_token_BT, batch)
        return {"x": x_BTD, "report": report_BR}


def feed_forward(config: Any, is_dense: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Return the second branch of a block: experts, or an MLP."""
    sizes: dict[str, Any] = {"activation": config.activation, "is_gated": config.is_gated}
    stddev = config.hidden_stddev
    if is_dense:
        stddevs = (stddev, stddev)
        options = {"use_bias": config.mlp_bias, "stddevs": stddevs, "rngs": rngs}
        return MLP(config.embed_dim, config.mlp_dim, **options, **sizes)
    sizes |= {"embed_dim": config.embed_dim, "expert_dim": config.expert_dim or config.mlp_dim}
    return Experts(config, stddevs=(stddev, stddev), rngs=rngs, **sizes)


class MixtureModel(Mixture, CausalModel):
    """A causal model that may have experts.

    A subclass has a `config`, stacks of `MixtureBlock`, `embed_tokens` and `outputs`, which is
    called with `activations_of(x)`.
    """

    can_split_sequence = True

    def embed_tokens(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        raise NotImplementedError

    def embed(self, batch: dict) -> Any:
        """Return the activations of `embed_tokens`; with a report if there is a loss."""
        x_BTD = self.embed_tokens(batch)
        report = self.first_report(x_BTD, batch)
        return {"x": x_BTD, **report} if report else x_BTD

    def head(self, x: Any, batch: dict) -> tuple[Sums, Sums, dict]:
        """Return (sums of weighted losses, sums of weights, metrics of the routers)."""
        loss, weight, _ = super().head(x, batch)
        report_BR = x.get("report") if isinstance(x, dict) else None
        return self.summed(
            {"lm_loss": loss, **self.further_losses(x, batch)}, weight, report_BR, batch
        )

    def further_losses(self, x: Any, batch: dict) -> dict[str, jax.Array]:
        """Return the sums of further losses by name, with the weights of the next tokens."""
        return {}


def activations_of(x: Any) -> jax.Array:
    """Return the activations `[B, T, D]` between blocks, without a report."""
    return x["x"] if isinstance(x, dict) else x
