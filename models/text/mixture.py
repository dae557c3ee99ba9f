"""The base of causal models that may have experts: routers' reports, losses and metrics.

Between the blocks of such a model, activations are a dict of `x`, [B, T, D], and `report`, [B, R];
see `models.layers.experts.RouterReport`. Without a loss, as in a generation, or without experts,
they are `x` alone.

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


class MixtureBlock(Block):
    """A block whose MLP may be `Experts`; a subclass has a `config`."""

    config: Any

    def __call__(self, x: Any, batch: dict, keys: jax.Array | None) -> Any:
        """Apply the block to `x`; arguments as in models/stack.py."""
        if not isinstance(x, dict):
            return super().__call__(x, batch, keys)
        x_BTD = super().__call__(x["x"], batch, keys)
        report_BR = x["report"]
        if isinstance(self.mlp, Experts):
            assert self.mlp.routing is not None
            is_token_BT = batch.get("segment_ids", jnp.ones_like(batch["tokens"])) != 0
            number = batch["layer"] - self.config.dense_layers
            report = RouterReport(self.config)
            report_BR = report.add(report_BR, self.mlp.routing, is_token_BT, number)
        return {"x": x_BTD, "report": report_BR}


def feed_forward(config: Any, is_dense: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Return the second branch of a block: experts, or an MLP."""
    sizes: dict[str, Any] = {"activation": config.activation, "is_gated": config.is_gated}
    stddev = config.init_stddev
    if is_dense:
        stddevs = (stddev, stddev)
        options = {"use_bias": config.mlp_bias, "stddevs": stddevs, "rngs": rngs}
        return MLP(config.embed_dim, config.mlp_dim, **options, **sizes)
    sizes |= {"embed_dim": config.embed_dim, "expert_dim": config.expert_dim or config.mlp_dim}
    return Experts(config, stddev=stddev, rngs=rngs, **sizes)


class MixtureModel(CausalModel):
    """A causal model that may have experts.

    A subclass has a `config`, stacks of `MixtureBlock`, `embed_tokens` and `outputs`, which is
    called with `activations_of(x)`.
    """

    @property
    def sees_whole_batch(self) -> bool:
        """Whether a loss balances the load of the whole batch; see models/stack.py."""
        return self.config.router_loss > 0 and self.config.router_loss_over == "batch"

    def embed_tokens(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        raise NotImplementedError

    def embed(self, batch: dict) -> Any:
        """Return the activations of `embed_tokens`; with a report if there is a loss."""
        x_BTD = self.embed_tokens(batch)
        if self.config.num_experts is None or "weights" not in batch:
            return x_BTD
        return {"x": x_BTD, "report": RouterReport(self.config).start(x_BTD)}

    def head(self, x: Any, batch: dict) -> tuple[Sums, Sums, dict]:
        """Return (sums of weighted losses, sums of weights, metrics of the routers)."""
        loss, weight, metrics = super().head(x, batch)
        if self.config.num_experts is None:
            return loss, weight, metrics
        router_loss, metrics = RouterReport(self.config).metrics(x["report"], batch["weights"])
        if router_loss is None:
            return loss, weight, metrics
        losses = {"lm_loss": loss, "router_loss": router_loss}
        return losses, dict.fromkeys(losses, weight), metrics

    def after_update(self, sums: Mapping, layer_of_slot: Mapping[str, np.ndarray]) -> Mapping:
        """Return the changes of the balancing biases; see models/stack.py."""
        config = self.config
        if not config.balancing_rate:
            return {}
        layers = {}
        first = -config.dense_layers
        for name in self.stacks:
            stack: Stack | None = getattr(self, name)
            if stack is None:
                continue
            for place, path in enumerate(stack.block_paths):
                block: Any = getattr(stack.layers, path[0]) if path else stack.layers
                if isinstance(block.mlp, Experts):
                    numbers = first + place + stack.layers_per_block * layer_of_slot[name]
                    layers[(name, "layers", *path, "mlp")] = numbers
            first += stack.num_layers * stack.layers_per_block
        return balance_changes(config, sums["expert_load"][0].sums, layers)


def activations_of(x: Any) -> jax.Array:
    """Return the activations `[B, T, D]` between blocks, without a report."""
    return x["x"] if isinstance(x, dict) else x
