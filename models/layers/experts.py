"""A mixture of experts: a router sends every token to a few of many small MLPs.

    scores = softmax or sigmoid of x · router        [B, T, E]
    choices = the C largest scores of each token     [B, T, C]
    y = sum over the choices of score · expert(x)  + shared MLP(x), if there is one

Neither the choices nor the losses depend on the mesh: ties go to the expert with the smaller
number, and everything that is counted is counted per row or over the whole batch. By default no
token is dropped; with a capacity, the first tokens of a row are kept.

Sums about the router travel with the activations, in one row per example: see `RouterReport`.

B batch, T seq, D embed, F mlp, E experts, C experts per token, G groups.

Source: Shazeer et al. 2017 (arXiv:1701.06538); Fedus et al. 2021 (arXiv:2101.03961);
DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.field_checks import check_choices, check_needs
from models.layers import float8
from models.layers.activations import ACTIVATIONS
from models.layers.basic import Linear, fits_float8, param
from models.layers.flops import declare_flops, dense_flops
from models.layers.lora import Lora
from models.layers.transformer import MLP
from models.metrics import Extremes
from sharding.logical import gather_tokens, scatter_tokens, sum_over_batch
from sharding.ops import sequence
from sharding.ops.experts import Sends, apply_experts

#: Values of `model.router_scores`.
_ROUTER_SCORES = ("softmax", "sigmoid")
#: Values of `model.router_loss_over`.
_ROUTER_LOSS_OVER = ("row", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Fields of the config of a model that may have experts."""

    num_experts: int | None = None  # experts of a layer; None for a model without any
    experts_per_token: int = 2  # experts that a token is sent to; 1: Switch
    expert_dim: int | None = None  # inner size of an expert; mlp_dim if None
    expert_bias: bool = False  # whether the projections of experts have biases: GPT-OSS
    # L of activation(min(gate, L)) · (1 + max(-L, min(up, L))), GPT-OSS; None: no limit
    gate_limit: float | None = None
    shared_expert_dim: int | None = None  # inner size of an MLP that all tokens go through, too
    shared_expert_gate: bool = False  # whether a sigmoid of x scales that MLP: Qwen 2
    router_bias: bool = False  # whether a learned bias is added to the logits: GPT-OSS
    router_scores: str = "softmax"  # of the logits: softmax | sigmoid
    router_normalizes: bool = True  # whether the scores of a token's experts are scaled to sum to 1
    router_scale: float = 1.0  # factor of the scores after that
    router_groups: int = 1  # groups of experts; a token's experts are of the best groups only
    router_groups_per_token: int = 1  # best groups, by their largest score ...
    router_group_scores: int = 1  # ... or by the sum of this many largest scores
    balancing_bias: bool = False  # whether a bias, which no gradient changes, shifts the choice
    balancing_rate: float = 0.0  # change of the bias per step towards an equal load
    router_loss: float = 0.0  # factor of the load-balancing loss
    router_loss_over: str = "row"  # load that it balances: of each row, or of the whole batch
    router_z_loss: float = 0.0  # factor of the mean squared log-sum-exp of the logits
    expert_capacity: float | None = None  # tokens per row and expert ÷ mean number; None: any
    expert_capacity_tokens: int | None = None  # instead, tokens per row and expert: Switch

    @property
    def are_dense(self) -> tuple[bool, ...]:
        """Whether each layer has an MLP instead of experts; layers as in `batch["layer"]`."""
        raise NotImplementedError

    @property
    def numbers_with_experts(self) -> np.ndarray:
        """int32[layers]: the number of each layer among those with experts."""
        return (np.cumsum(~np.array(self.are_dense)) - 1).astype(np.int32)

    def check_experts(self, *layout: str) -> None:
        """Check the fields of experts.

        Args:
            *layout: names of further fields, which choose the layers with experts.

        Raises:
            ValueError: names fields, values and the rule that they violate.
        """
        if self.num_experts is None:
            names = {*layout, *(f.name for f in dataclasses.fields(ExpertsConfig))}
            for field in dataclasses.fields(self):
                name = field.name
                if name in names and getattr(self, name) != field.default:
                    raise ValueError(
                        f"model.{name}={getattr(self, name)} needs experts; set model.num_experts, "
                        f"or leave model.{name} out"
                    )
            return
        check_choices(self, router_scores=_ROUTER_SCORES, router_loss_over=_ROUTER_LOSS_OVER)
        self._check_choice(self.num_experts)
        if all(self.are_dense):
            fields = ", ".join(f"model.{name}={getattr(self, name)}" for name in layout)
            raise ValueError(
                f"model.num_experts={self.num_experts} with {fields} gives no layer experts; "
                f"correct model.{layout[0]}, or leave model.num_experts out"
            )
        for name in ("router_loss", "router_z_loss", "balancing_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be 0 or positive")
        if self.balancing_rate and not self.balancing_bias:
            raise ValueError(
                f"model.balancing_rate={self.balancing_rate} changes a bias, but "
                "model.balancing_bias=False; set it to True"
            )
        self._check_capacity()
        if self.gate_limit is not None and not (self.gate_limit > 0 and self.is_gated):  # type: ignore[attr-defined]
            raise ValueError(
                f"model.gate_limit={self.gate_limit} must be positive, and needs "
                "model.is_gated=True; correct both, or set it to None"
            )
        check_needs(self, shared_expert_gate="shared_expert_dim")

    def _check_capacity(self) -> None:
        for name in ("expert_capacity", "expert_capacity_tokens"):
            capacity = getattr(self, name)
            if capacity is not None and not capacity > 0:
                raise ValueError(f"model.{name}={capacity} must be positive, or None")
        if None not in (self.expert_capacity, self.expert_capacity_tokens):
            raise ValueError(
                f"model.expert_capacity={self.expert_capacity} and model.expert_capacity_tokens="
                f"{self.expert_capacity_tokens} are the same setting; set one of them to None"
            )

    def _check_choice(self, experts: int) -> None:
        groups = self.router_groups
        of_groups = experts // max(1, groups) * self.router_groups_per_token
        if not 1 <= self.experts_per_token <= min(experts, of_groups):
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} must be at least 1, and at most "
                f"the {min(experts, of_groups)} experts that a token can choose from"
            )
        if groups < 1 or experts % groups or not 1 <= self.router_groups_per_token <= groups:
            raise ValueError(
                f"model.router_groups={groups} must divide model.num_experts={experts}, and "
                f"model.router_groups_per_token={self.router_groups_per_token} be from 1 to that"
            )
        if not 1 <= self.router_group_scores <= experts // groups:
            raise ValueError(
                f"model.router_group_scores={self.router_group_scores} must be from 1 to the "
                f"{experts // groups} experts of a group"
            )


class Routing(NamedTuple):
    """The experts of each token, and the scores behind the choice.

    Attributes:
        choices_BTC: int32, numbers of experts.
        fits_BTC: bool, whether the expert has room for the token; None if there is always room.
        factors_BTC: factors of the experts' outputs, float32 or wider.
        probabilities_BTE: scores, divided by their sum.
        logits_BTE: logits of the router.
    """

    choices_BTC: jax.Array
    fits_BTC: jax.Array | None
    factors_BTC: jax.Array
    probabilities_BTE: jax.Array
    logits_BTE: jax.Array


class RouterReport:
    """Sums about routers that travel with the activations: one row `[B, R]` per example.

    The columns are the losses of all layers, their mean entropy in nats, the mean part of choices
    that were dropped, and for each layer the number of the row's tokens that chose each expert.
    """

    def __init__(self, config: ExpertsConfig):
        assert config.num_experts is not None
        self._config = config
        self._num_layers = config.are_dense.count(False)
        self._num_experts = config.num_experts

    def start(self, x_BTD: jax.Array) -> jax.Array:
        """Return the report before the first layer."""
        size = 3 + self._num_layers * self._num_experts
        return jnp.zeros((x_BTD.shape[0], size), _wide(x_BTD))

    def add(
        self, report_BR: jax.Array, routing: Routing, weights_BT: jax.Array, number: jax.Array
    ) -> jax.Array:
        """Return the report with the sums of one more layer.

        Args:
            report_BR: report so far.
            routing: of the layer.
            weights_BT: 1 for tokens that count, 0 for padding.
            number: int32[], number of the layer, as in `batch["layer"]`.
        """
        config = self._config
        number = jnp.asarray(config.numbers_with_experts)[number]
        weights = weights_BT.astype(report_BR.dtype)
        per_token = config.experts_per_token

        def over_row(x: jax.Array) -> jax.Array:
            return sequence.sum_over_tokens(jnp.sum(x * weights.reshape(*weights.shape, 1), axis=1))

        numbers = jnp.arange(self._num_experts)
        is_chosen = (routing.choices_BTC[..., None] == numbers).any(axis=2)
        counts_BE = jax.lax.stop_gradient(over_row(is_chosen.astype(report_BR.dtype)))
        tokens_B1 = over_row(jnp.ones_like(routing.logits_BTE[..., :1]))
        divisor_B1 = jnp.maximum(tokens_B1, 1)
        p_BTE = routing.probabilities_BTE
        entropy_B1 = over_row(-jnp.sum(_x_log_x(p_BTE), axis=-1, keepdims=True)) / divisor_B1
        z_BT1 = jax.nn.logsumexp(routing.logits_BTE, axis=-1, keepdims=True)
        z_loss_B1 = over_row(jnp.square(z_BT1)) / divisor_B1
        p_BE = over_row(p_BTE)
        row_counts_BE = counts_BE
        if config.router_loss_over == "batch":
            row_counts_BE, p_BE, tokens_B1 = (
                jax.tree.map(lambda x: sum_over_batch(jnp.sum(x, axis=0, keepdims=True)), sums)
                for sums in (counts_BE, p_BE, tokens_B1)
            )
        square = jnp.square(jnp.maximum(tokens_B1, 1)) * per_token / self._num_experts
        balance_B1 = jnp.sum(row_counts_BE * p_BE, axis=1, keepdims=True) / square
        losses_B1 = config.router_loss * balance_B1 + config.router_z_loss * z_loss_B1
        fits_BTC = True if routing.fits_BTC is None else routing.fits_BTC
        is_dropped_BTC = jnp.broadcast_to(~jnp.asarray(fits_BTC), routing.choices_BTC.shape)
        dropped_B1 = over_row(
            jnp.mean(is_dropped_BTC, axis=-1, keepdims=True, dtype=report_BR.dtype)
        )
        dropped_B1 /= divisor_B1
        means = jnp.concatenate([entropy_B1, dropped_B1], axis=1) / self._num_layers
        losses_B1 = jnp.broadcast_to(losses_B1, entropy_B1.shape)
        report_BR = report_BR.at[:, :3].add(
            jnp.concatenate([losses_B1, jax.lax.stop_gradient(means)], axis=1)
        )
        start = 3 + number * self._num_experts
        return jax.lax.dynamic_update_slice_in_dim(report_BR, counts_BE, start, axis=1)

    def metrics(
        self, report_BR: jax.Array, weights_BT: jax.Array
    ) -> tuple[jax.Array | None, dict[str, Any]]:
        """Return the sum of the routers' losses, or None without any, and their metrics.

        Args:
            report_BR: report after the last layer.
            weights_BT: weights of the tokens in the loss; each row counts as much as its tokens.
        """
        weights_B = jnp.sum(weights_BT, axis=1).astype(report_BR.dtype)
        weight = jnp.sum(weights_B)
        loss, entropy, dropped = (jnp.sum(report_BR[:, i] * weights_B) for i in range(3))
        counts_LE = jnp.sum(report_BR[:, 3:], axis=0).reshape(self._num_layers, -1)
        has_loss = self._config.router_loss or self._config.router_z_loss
        return loss if has_loss else None, {
            "router_entropy": (entropy, weight),
            "dropped_tokens": (dropped, weight),
            # All layers have as many choices, so a load of 1 is the mean.
            "expert_load": (Extremes(counts_LE), jnp.mean(counts_LE)),
        }


def balance_changes(
    config: ExpertsConfig,
    counts_LE: jax.Array,
    layers: Mapping[tuple[str, ...], np.ndarray],
) -> dict[tuple[str, ...], jax.Array]:
    """Return how the balancing biases change after a step.

    Args:
        config: model's config.
        counts_LE: how often each expert was chosen, in each layer with experts.
        layers: path of the parameters of a block's experts -> int[slots], their layers among those
            with experts; -1 for padding.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
    """
    signs_LE = jnp.sign(jnp.mean(counts_LE, axis=1, keepdims=True) - counts_LE)
    return {
        (*path, "balance"): config.balancing_rate * signs_LE[np.maximum(numbers, 0)]
        for path, numbers in layers.items()
    }


#: Weights of experts -> their logical axes.
_AXES = {
    "gate": ("experts", "embed", "mlp"),
    "up": ("experts", "embed", "mlp"),
    "down": ("experts", "mlp", "embed"),
    "gate_bias": ("experts", "mlp"),
    "up_bias": ("experts", "mlp"),
    "down_bias": ("experts", "embed"),
    "gate_lora_a": ("experts", "embed", None),
    "gate_lora_b": ("experts", None, "mlp"),
    "up_lora_a": ("experts", "embed", None),
    "up_lora_b": ("experts", None, "mlp"),
    "down_lora_a": ("experts", "mlp", None),
    "down_lora_b": ("experts", None, "embed"),
    # Scales are the same for all experts.
    "gate_scaling": (),
    "up_scaling": (),
    "down_scaling": (),
}
#: The products of an expert.
_PRODUCTS = ("gate", "up", "down")


class Experts(nnx.Module):
    """A router, its experts, and the MLP that they may share.

    Args:
        config: fields of experts.
        embed_dim: D.
        expert_dim: F.
        activation: key of ACTIVATIONS.
        is_gated: whether each MLP multiplies its activation by a third projection.
        stddevs: standard deviations for initializing the kernels of (up, gate and router, down).
        rngs: random keys for the initialization.

    Attributes:
        routing: where the tokens of the last call went; None before it.
        float8_weights: names of the weights whose products can be in float8.
        in_float8: whether these products are in float8. `gate_scaling`, `up_scaling` and
            `down_scaling` are their scales; None: current scaling. See models/layers/float8.py.
        router_lora: adapter of the router, if it has one; `gate_lora`, `up_lora` and `down_lora`
            belong to the experts' products. See models/layers/lora.py.
    """

    same_input = ("gate", "up")

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        embed_dim: int,
        expert_dim: int,
        activation: str,
        is_gated: bool,
        stddevs: tuple[float, float],
        rngs: nnx.Rngs,
    ):
        assert config.num_experts is not None
        self.config = config
        self.num_experts = config.num_experts
        normal, normal_down = (jax.nn.initializers.normal(stddev) for stddev in stddevs)
        # Every device has the scores of all experts.
        router = (embed_dim, config.num_experts), ("embed", None)
        self.router = param(normal, rngs, *router)
        zeros = jax.nn.initializers.zeros
        of_router = router[0][1:], (None,)
        self.router_bias = param(zeros, rngs, *of_router) if config.router_bias else None
        self.balance = param(zeros, rngs, *of_router) if config.balancing_bias else None
        up = (config.num_experts, embed_dim, expert_dim), ("experts", "embed", "mlp")
        down = (config.num_experts, expert_dim, embed_dim), ("experts", "mlp", "embed")
        self.gate = param(normal, rngs, *up) if is_gated else None
        self.up = param(normal, rngs, *up)
        self.down = param(normal_down, rngs, *down)
        has_bias = config.expert_bias
        of_up, of_down = ((shape[::2], axes[::2]) for shape, axes in (up, down))
        self.gate_bias = param(zeros, rngs, *of_up) if is_gated and has_bias else None
        self.up_bias = param(zeros, rngs, *of_up) if has_bias else None
        self.down_bias = param(zeros, rngs, *of_down) if has_bias else None
        self.expert = _Expert(activation, config.gate_limit)
        self.routing: Routing | None = nnx.data(None)
        products = [name for name in _PRODUCTS if getattr(self, name) is not None]
        self.float8_weights = tuple(products) if fits_float8(embed_dim, expert_dim) else ()
        self.in_float8 = False
        self.gate_scaling: float8.Scaling | None = nnx.data(None)
        self.up_scaling: float8.Scaling | None = nnx.data(None)
        self.down_scaling: float8.Scaling | None = nnx.data(None)
        self.router_lora: Lora | None = nnx.data(None)
        self.gate_lora: Lora | None = nnx.data(None)
        self.up_lora: Lora | None = nnx.data(None)
        self.down_lora: Lora | None = nnx.data(None)
        mlp = {"activation": activation, "is_gated": is_gated}
        self.shared = _shared_mlp(config, embed_dim, stddevs, mlp, rngs)
        sizes = {"embed": embed_dim}, {"_gate": 1}
        self.shared_gate = (
            Linear(*sizes, stddev=stddevs[0], use_bias=False, rngs=rngs)
            if config.shared_expert_gate
            else None
        )

    def use_float8(self, name: str, scaling: float8.Scaling | None) -> None:
        """Compute the product with a weight in float8; see models/layers/basic.py."""
        self.in_float8 = True
        setattr(self, f"{name}_scaling", scaling)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the output `[B, T, D]`; sets `routing`."""
        whole_BTD = gather_tokens(x_BTD)
        routing = self.route(whole_BTD)
        self.routing = routing
        choices_BTC = routing.choices_BTC
        if routing.fits_BTC is not None:
            choices_BTC = jnp.where(routing.fits_BTC, choices_BTC, self.num_experts)
        weights = self._weights()
        of_mesh = {
            "axes": {name: _AXES[name] for name in weights},
            "added": ("down_bias",),
            "num_experts": self.num_experts,
        }
        # Only the experts that tokens choose count, however unevenly they do. Adapters are not the
        # model's work; see models/flops.py.
        products = [weights[name].shape[1:] for name in _PRODUCTS if name in weights]
        flops = choices_BTC.size * sum(dense_flops(*sizes) for sizes in products)
        inputs = weights, whole_BTD, routing.factors_BTC, choices_BTC
        expert = dataclasses.replace(self.expert, in_float8=self.in_float8)
        apply = partial(apply_experts, expert, **of_mesh, sends=_sends_of(weights))
        y_BTD = declare_flops(flops, apply, *inputs)
        y_BTD = scatter_tokens(y_BTD)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = jax.nn.sigmoid(self.shared_gate(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD

    def _weights(self) -> dict[str, jax.Array]:
        """Return weights, adapters and scales of the experts, by their names in `_AXES`."""
        names = [*_PRODUCTS, *(f"{name}_bias" for name in _PRODUCTS)]
        leaves = {name: getattr(self, name) for name in names}
        weights = {name: leaf[...] for name, leaf in leaves.items() if leaf is not None}
        for name in _PRODUCTS:
            scaling: float8.Scaling | None = getattr(self, f"{name}_scaling")
            if scaling is not None:
                of_input, others = scaling
                weights[f"{name}_scaling"] = jnp.concatenate([of_input[None], others])
            adapter: Lora | None = getattr(self, f"{name}_lora")
            if adapter is not None:
                weights[f"{name}_lora_a"] = adapter.a[...]
                weights[f"{name}_lora_b"] = adapter.scale * adapter.b[...]
        return weights

    def route(self, x_BTD: jax.Array) -> Routing:
        """Return where tokens go; all in float32 or wider."""
        config = self.config
        wide = _wide(x_BTD)
        logits_BTE = _wide_product(x_BTD, self.router[...])
        if (adapter := self.router_lora) is not None:
            narrow_BTr = _wide_product(x_BTD, adapter.a[...])
            logits_BTE += adapter.scale * _wide_product(narrow_BTr, adapter.b[...])
        if self.router_bias is not None:
            logits_BTE += self.router_bias[...].astype(wide)
        if config.router_scores == "softmax":
            scores_BTE = jax.nn.softmax(logits_BTE, axis=-1)
            probabilities_BTE = scores_BTE
        else:
            scores_BTE = jax.nn.sigmoid(logits_BTE)
            probabilities_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
        ranks_BTE = jax.lax.stop_gradient(scores_BTE)
        if self.balance is not None:
            ranks_BTE = ranks_BTE + jax.lax.stop_gradient(self.balance[...]).astype(wide)
        choices_BTC = _choose(_of_best_groups(ranks_BTE, config), config.experts_per_token)
        # A sum instead of a lookup, whose gradient would be a scatter.
        is_choice = choices_BTC[..., None] == jnp.arange(self.num_experts)
        factors_BTC = jnp.sum(jnp.where(is_choice, scores_BTE[:, :, None], 0), axis=-1)
        if config.router_normalizes:
            factors_BTC /= jnp.sum(factors_BTC, axis=-1, keepdims=True) + 1e-20
        factors_BTC *= config.router_scale
        fits_BTC = self._fits(choices_BTC)
        return Routing(choices_BTC, fits_BTC, factors_BTC, probabilities_BTE, logits_BTE)

    def _fits(self, choices_BTC: jax.Array) -> jax.Array | None:
        """Return bool[B, T, C], whether a choice is among the first ones of its row and expert.

        None: all are, because there is no capacity.
        """
        config = self.config
        capacity = config.expert_capacity_tokens
        if config.expert_capacity is not None:
            length = sequence.whole_length(choices_BTC.shape[1])
            mean = length * config.experts_per_token / self.num_experts
            capacity = max(1, math.ceil(config.expert_capacity * mean))
        if capacity is None:
            return None
        whole_BTC = sequence.whole_rows(choices_BTC)
        is_choice = whole_BTC[..., None] == jnp.arange(self.num_experts)
        up_to = jnp.cumsum(is_choice.any(axis=2), axis=1, dtype=jnp.int32)
        fits_BTC = jnp.sum(jnp.where(is_choice, up_to[:, :, None], 0), axis=-1) <= capacity
        return sequence.local_tokens(fits_BTC)


def _shared_mlp(
    config: ExpertsConfig,
    embed_dim: int,
    stddevs: tuple[float, float],
    options: Mapping[str, Any],
    rngs: nnx.Rngs,
) -> MLP | None:
    """Return the MLP for all tokens, if there is one."""
    if not config.shared_expert_dim:
        return None
    options = {"use_bias": False, "stddevs": stddevs, **options}
    return MLP(embed_dim, config.shared_expert_dim, rngs=rngs, **options)


@dataclasses.dataclass(frozen=True)
class _Expert:
    """The MLP of one expert, or of several, as sharding/ops/experts.py calls it.

    With several, weights, x and factors have a first dim of experts.
    """

    activation: str
    gate_limit: float | None
    in_float8: bool = False

    def __call__(self, weights: Any, x_bD: jax.Array, factors_b: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        up_bF = self._product(x_bD, weights, "up")
        if "gate" not in weights:
            h_bF = activation(up_bF)
        else:
            gate_bF = self._product(x_bD, weights, "gate")
            if (limit := self.gate_limit) is not None:
                gate_bF = jnp.minimum(gate_bF, limit)
                up_bF = jnp.clip(up_bF, -limit, limit) + 1
            h_bF = activation(gate_bF) * up_bF
        # The factors come before the last product, so that their gradient does not need its result.
        factors_b1 = factors_b[..., None]
        scaled_bF = (h_bF.astype(factors_b.dtype) * factors_b1).astype(x_bD.dtype)
        return self._product(scaled_bF, weights, "down", factors_b1)

    def _product(
        self,
        x: jax.Array,
        weights: Mapping[str, jax.Array],
        name: str,
        factors_b1: jax.Array | None = None,
    ) -> jax.Array:
        """Return x · W, plus x · A · B if W has an adapter, plus factors · bias if it has one."""
        kernel = weights[name]
        if self.in_float8:
            scaling = _scaling(weights, name)
            y = float8.product(x, kernel, 1, scaling, num_batch=kernel.ndim - 2)
        else:
            y = x @ kernel
        if f"{name}_lora_a" in weights:
            y += (x @ weights[f"{name}_lora_a"]) @ weights[f"{name}_lora_b"]
        if f"{name}_bias" not in weights:
            return y
        bias = weights[f"{name}_bias"][..., None, :]
        if factors_b1 is not None:
            bias = (bias.astype(factors_b1.dtype) * factors_b1).astype(x.dtype)
        return y + bias


def _scaling(weights: Mapping[str, jax.Array], name: str) -> float8.Scaling | None:
    """Return the scales of delayed scaling of the product `name`; None without any."""
    rows = weights.get(f"{name}_scaling")
    return None if rows is None else (rows[0], rows[1:])


def _sends_of(weights: Mapping[str, jax.Array]) -> Sends | None:
    """Return how tokens are sent in float8; None: in their own dtype.

    A device sends the codes that products would round tokens to after they were received. So this
    changes no result. It is possible with delayed scaling, if nothing but products reads tokens and
    gradients: no adapters, and no bias of the last product.
    """
    has_scales = "up_scaling" in weights and "down_scaling" in weights
    is_read = any(name.endswith("_lora_a") for name in weights) or "down_bias" in weights
    return _SENDS_FLOAT8 if has_scales and not is_read else None


def _narrow_tokens(weights: Mapping[str, jax.Array], x: jax.Array, name: str) -> jax.Array:
    scaling = _scaling(weights, _READ_BY[name])
    assert scaling is not None
    return float8.narrow(x, scaling, name)


def _widen_tokens(
    weights: Mapping[str, jax.Array], codes: jax.Array, name: str, dtype: Any
) -> jax.Array:
    scaling = _scaling(weights, _READ_BY[name])
    assert scaling is not None
    return float8.widen(codes, scaling, name, dtype)


#: Tensors that are sent -> a product that reads them. `gate` reads the input with the same scale.
_READ_BY = {"input": "up", "gradient": "down"}
_SENDS_FLOAT8 = Sends(narrow=_narrow_tokens, widen=_widen_tokens)


def _wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return x · kernel, with operands in the dtype of x, in float32 or wider."""
    return jnp.matmul(
        x,
        kernel.astype(x.dtype),
        preferred_element_type=_wide(x),
        precision=jax.lax.Precision.HIGHEST,
    )


def _of_best_groups(ranks_BTE: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Return the ranks of experts, -inf outside the best groups of a token."""
    groups = config.router_groups
    if groups == config.router_groups_per_token:
        return ranks_BTE
    ranks_BTGe = ranks_BTE.reshape(*ranks_BTE.shape[:-1], groups, -1)
    best = jax.lax.top_k(ranks_BTGe, config.router_group_scores)[0]
    chosen = _choose(jnp.sum(best, axis=-1), config.router_groups_per_token)
    is_best_BTG = (chosen[..., None] == jnp.arange(groups)).any(axis=-2)
    return jnp.where(is_best_BTG[..., None], ranks_BTGe, -jnp.inf).reshape(ranks_BTE.shape)


def _choose(ranks: jax.Array, count: int) -> jax.Array:
    """Return int32[..., count], the numbers of the largest ranks; of equal ones, the first.

    `jax.lax.top_k` may choose another one of equals on GPUs.
    """
    choices = []
    for _ in range(count):
        choice = jnp.argmax(ranks, axis=-1).astype(jnp.int32)
        choices.append(choice)
        is_chosen = jnp.arange(ranks.shape[-1]) == choice[..., None]
        ranks = jnp.where(is_chosen, -jnp.inf, ranks)
    return jnp.stack(choices, axis=-1)


def _x_log_x(x: jax.Array) -> jax.Array:
    return x * jnp.log(jnp.where(x > 0, x, 1))


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
