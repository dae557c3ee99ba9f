"""The LLaMA family: rotary positions, RMS norms, grouped-query attention and a gated MLP.

One class implements LLaMA 1 to 3, Mistral, Qwen 2, 2.5 and 3, OLMo 2, Granite 3 and Seed-OSS, which
differ in their configs.

B batch, T seq, D embed, V vocab.

Source: Touvron et al. 2023 (arXiv:2302.13971), section 2.2, and (arXiv:2307.09288), section 2.2;
Jiang et al. 2023 (arXiv:2310.06825); Yang et al. 2024 (arXiv:2407.10671), section 2.2, and 2025
(arXiv:2505.09388), section 2.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.flops import attention_flops, dense_flops
from models.layers.activations import check_activation
from models.layers.basic import NORM_KINDS, LayerNorm, RMSNorm, lookup, param
from models.layers.block import Block
from models.layers.experts import Experts, ExpertsConfig, RouterReport, balance_changes
from models.layers.latent_attention import LatentAttention
from models.layers.transformer import MLP, Attention
from models.losses import make_token_loss
from models.stack import Sums
from models.text.causal import CausalModel
from models.text.common import check_head, padded_vocab, segments
from models.text.layer_types import LayerTypesConfig, stacks_of

#: Values of `model.norms`.
_NORMS = ("before", "after", "around", "parallel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ExpertsConfig, LayerTypesConfig):
    """Sizes and variants of a model of the LLaMA family."""

    vocab_size: int  # number of tokens in the tokenizer's vocab
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    embed_dim: int
    mlp_dim: int
    rotary_fraction: float = 1.0  # share of a head's features that are rotated
    norm: str = "rms"  # rms | rms_1p | layer | layer_1p | layer_no_bias; see models/layers/basic.py
    activation: str = "silu"  # of the MLP; see models/layers/activations.py
    is_gated: bool = True  # whether the MLP multiplies its activation by a third projection
    qkv_bias: bool = False  # Qwen 2
    out_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # norms of queries and keys, of each head: Qwen 3
    qk_norm_over_heads: bool = False  # these norms are over all heads together: OLMo 2
    qk_norm_by_head: bool = False  # these are layer norms, with a scale for each head: Command-R+
    attention_sinks: bool = False  # whether heads can attend to nothing: GPT-OSS
    norms: str = (
        "before"  # of a branch: before | after | around | parallel; see models/layers/block.py
    )
    latent_dim: int | None = None  # of keys and values: latent attention; DeepSeek-V2
    query_latent_dim: int | None = None  # the same for queries, which may have none
    latent_rotary_dim: int = 64  # with latents: rotated features of a head, besides head_dim others
    value_dim: int | None = None  # with latents: size of a head's values; head_dim if None
    embedding_scale: float = 1.0  # of the embedding, and of the following: Granite
    attention_scale: float | None = None  # of queries · keys; 1 / √head_dim if None
    attention_softcap: float | None = None  # c of c · tanh(scores / c); Gemma 2
    logit_softcap: float | None = None  # the same for the logits, after logit_scale
    residual_scale: float = 1.0  # of the output of attention and of the MLP
    logit_scale: float = 1.0
    tie_embeddings: bool = False  # whether the head uses the token embedding
    vocab_multiple: int = 128  # the vocab is padded to a multiple of this
    rms_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02
    loss: str = "cross_entropy"  # or an import path; see models/losses.py
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} must divide "
                f"model.num_heads={self.num_heads}"
            )
        for name, choices in (("norms", _NORMS), ("norm", NORM_KINDS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"model.{name}={value!r} is unknown; choose {', '.join(choices)}")
        check_activation(self.activation)
        for name in ("attention_softcap", "logit_softcap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"model.{name}={value} must be positive, or None for no cap")
        if not 0.0 < self.rotary_fraction <= 1.0:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} must be more than 0 and at most 1"
            )
        if self.rotary_fraction < 1.0 and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of model.head_dim={self.head_dim} "
                f"is {self.rotary_dim} features, which must be even: they are rotated in pairs"
            )
        self._check_latents()
        for name in ("qk_norm_over_heads", "qk_norm_by_head"):
            if getattr(self, name) and not self.qk_norm:
                raise ValueError(
                    f"model.{name}=True needs model.qk_norm=True; set it, or leave both out"
                )
        if self.qk_norm_over_heads and self.qk_norm_by_head:
            raise ValueError(
                "model.qk_norm_over_heads=True and model.qk_norm_by_head=True exclude each other; "
                "choose one of them"
            )
        self.check_rotation()
        make_token_loss(self.loss)
        check_head(self.head)
        self.check_experts()

    def _check_latents(self) -> None:
        if self.latent_dim is None:
            for name in ("query_latent_dim", "value_dim"):
                if getattr(self, name) is not None:
                    raise ValueError(f"model.{name} needs model.latent_dim; set it, or leave both")
            return
        if (
            self.num_kv_heads != self.num_heads
            or self.qk_norm
            or self.attention_sinks
            or self.qkv_bias != self.out_bias
        ):
            raise ValueError(
                f"model.latent_dim={self.latent_dim} needs model.num_kv_heads={self.num_heads}, "
                "the number of heads, model.qk_norm=False, model.attention_sinks=False, and equal "
                "values of model.qkv_bias and model.out_bias"
            )

    @property
    def num_dense(self) -> int:
        """Number of layers without experts, which are the first ones."""
        return self.num_layers if self.num_experts is None else self.dense_layers

    @property
    def router_report(self) -> RouterReport:
        """What travels with the activations of a model with experts."""
        return RouterReport(self, self.num_layers - self.dense_layers)

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return (
            self.latent_rotary_dim
            if self.latent_dim is not None
            else int(self.head_dim * self.rotary_fraction)
        )

    @property
    def score_scale(self) -> float:
        """Factor of queries · keys."""
        if self.attention_scale is not None:
            return self.attention_scale
        rotary_dim = 0 if self.latent_dim is None else self.rotary_dim
        return 1 / math.sqrt(self.head_dim + rotary_dim)

    def make_norm(self, features: int, rngs: nnx.Rngs) -> nnx.Module:
        """Return a norm of activations with so many features."""
        return NORM_KINDS[self.norm](features, epsilon=self.rms_norm_epsilon, rngs=rngs)


def _attention(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.Module:
    embed = config.embed_dim
    stddev = config.init_stddev
    size = config.head_dim
    if config.latent_dim is not None:
        return LatentAttention(
            embed,
            config.num_heads,
            head_dim=size,
            rotary_dim=config.rotary_dim,
            value_dim=config.value_dim or size,
            latent_dim=config.latent_dim,
            query_latent_dim=config.query_latent_dim,
            use_bias=config.qkv_bias,
            stddev=stddev,
            rngs=rngs,
        )

    def head_norms() -> tuple[nnx.Module, nnx.Module]:
        if not config.qk_norm_over_heads and not config.qk_norm_by_head:
            return config.make_norm(size, rngs), config.make_norm(size, rngs)
        make = partial(LayerNorm, use_bias=False) if config.qk_norm_by_head else RMSNorm
        norm = {"epsilon": config.rms_norm_epsilon, "rngs": rngs}
        queries = make({"heads": config.num_heads, "head_dim": size}, **norm)
        return queries, make({"kv_heads": config.num_kv_heads, "head_dim": size}, **norm)

    return Attention(
        embed,
        config.num_heads,
        size,
        num_kv_heads=config.num_kv_heads,
        use_bias=config.qkv_bias,
        use_out_bias=config.out_bias,
        stddevs=(stddev, stddev, stddev),
        make_head_norms=head_norms if config.qk_norm else None,
        has_sinks=config.attention_sinks,
        rngs=rngs,
    )


def _feed_forward(config: LlamaConfig, is_dense: bool, rngs: nnx.Rngs) -> nnx.Module:
    sizes: dict[str, Any] = {"activation": config.activation, "is_gated": config.is_gated}
    stddev = config.init_stddev
    if is_dense:
        return MLP(
            config.embed_dim,
            config.mlp_dim,
            use_bias=config.mlp_bias,
            stddevs=(stddev, stddev),
            rngs=rngs,
            **sizes,
        )
    return Experts(
        config,
        embed_dim=config.embed_dim,
        expert_dim=config.expert_dim or config.mlp_dim,
        stddev=stddev,
        rngs=rngs,
        **sizes,
    )


class _Block(Block):
    def __init__(self, config: LlamaConfig, layer_type: str, is_dense: bool, *, rngs: nnx.Rngs):

        def norm_if(*placements: str) -> nnx.Module | None:
            return config.make_norm(config.embed_dim, rngs) if config.norms in placements else None

        super().__init__(
            attention_norm=norm_if("before", "around", "parallel"),
            attention=_attention(config, rngs),
            mlp_norm=norm_if("before", "around"),
            mlp=_feed_forward(config, is_dense, rngs),
            norms=config.norms,
            attention_norm_2=norm_if("after", "around"),
            mlp_norm_2=norm_if("after", "around"),
            scale=config.residual_scale,
        )
        self.config = config
        self.layer_type = layer_type

    def __call__(self, x: Any, batch: dict, keys: jax.Array | None) -> Any:
        """Apply the block to `x`, activations [B, T, D] or a dict of them and a `RouterReport`."""
        if not isinstance(x, dict):
            return super().__call__(x, batch, keys)
        x_BTD = super().__call__(x["x"], batch, keys)
        report_BR = x["report"]
        if isinstance(self.mlp, Experts):
            assert self.mlp.routing is not None
            is_token_BT = batch.get("segment_ids", jnp.ones_like(batch["tokens"])) != 0
            number = batch["layer"] - self.config.dense_layers
            report = self.config.router_report
            report_BR = report.add(report_BR, self.mlp.routing, is_token_BT, number)
        return {"x": x_BTD, "report": report_BR}

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        config = self.config
        return self.attention(
            x_BTD,
            rotate=config.rotation(self.layer_type, x_BTD, batch),
            is_causal=True,
            window=config.window(self.layer_type),
            segments=segments(batch),
            scale=config.score_scale,
            softcap=config.attention_softcap,
        )


class Llama(CausalModel):
    """A causal language model."""

    Config = LlamaConfig
    stacks = ("decoder", "last_decoder")
    can_share_vocab = True
    not_decayed = ("router_bias", "gate_bias", "up_bias", "down_bias")

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = jax.nn.initializers.normal(config.init_stddev)
        vocab = padded_vocab(config.vocab_size, config.vocab_multiple)
        table = (vocab, config.embed_dim), ("vocab", "embed")
        self.token_embedding = param(normal, rngs, *table)

        are_dense = (number < config.num_dense for number in range(config.num_layers))
        self.decoder, self.last_decoder = stacks_of(
            [*zip(config.types, are_dense, strict=True)],
            lambda kind, *, rngs: _Block(config, *kind, rngs=rngs),
            rngs=rngs,
        )
        self.final_norm = config.make_norm(config.embed_dim, rngs)
        has_own_table = config.head == "lm" and not config.tie_embeddings
        self.output_embedding = param(normal, rngs, *table) if has_own_table else None

    @property
    def sees_whole_batch(self) -> bool:
        """Whether a loss balances the load of the whole batch; see models/stack.py."""
        return self.config.router_loss > 0 and self.config.router_loss_over == "batch"

    def embed(self, batch: dict) -> Any:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T].

        With experts and a loss, they are in a dict with a `RouterReport`.
        """
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        x_BTD = _scaled(x_BTD, self.config.embedding_scale)
        if self.config.num_experts is None or "weights" not in batch:
            return x_BTD
        return {"x": x_BTD, "report": self.config.router_report.start(x_BTD)}

    def head(self, x: Any, batch: dict) -> tuple[Sums, Sums, dict]:
        """Return (sums of weighted losses, sums of weights, metrics of the routers)."""
        loss, weight, metrics = super().head(x, batch)
        if self.config.num_experts is None:
            return loss, weight, metrics
        report = self.config.router_report
        router_loss, metrics = report.metrics(x["report"], batch["weights"])
        if router_loss is None:
            return loss, weight, metrics
        losses = {"lm_loss": loss, "router_loss": router_loss}
        return losses, dict.fromkeys(losses, weight), metrics

    def after_update(self, sums: Mapping, layer_of_slot: Mapping) -> Mapping:
        """Return the changes of the balancing biases; see models/stack.py."""
        config = self.config
        layers = {}
        first = -config.dense_layers
        for name in self.stacks:
            if (stack := getattr(self, name)) is None:
                continue
            blocks = stack.layers
            for place, path in enumerate(stack.block_paths):
                block = getattr(blocks, path[0]) if path else blocks
                if config.balancing_rate and isinstance(block.mlp, Experts):
                    numbers = first + place + stack.layers_per_block * layer_of_slot[name]
                    layers[(name, "layers", *path, "mlp")] = numbers
            first += stack.num_layers * stack.layers_per_block
        counts_LE = sums["expert_load"][0] if layers else None
        return balance_changes(config, counts_LE, layers) if layers else {}

    def outputs(self, x: Any) -> tuple[jax.Array, jax.Array]:
        """Return the two factors of the logits, `[B, T, D]` and `[V, D]`."""
        x_BTD = x["x"] if isinstance(x, dict) else x
        table = self.token_embedding if self.output_embedding is None else self.output_embedding
        return _scaled(self.final_norm(x_BTD), self.config.logit_scale), table[...]

    def forward_flops(self, shapes: dict) -> int:
        """Return the matrix-product FLOPs of a batch's forward pass; see models/flops.py."""
        config = self.config
        embed = self.config.embed_dim
        batch, length = shapes["tokens"].shape
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        head_dim = config.head_dim
        kernels = dense_flops(embed, 2 * (heads + kv_heads) * head_dim)
        if config.latent_dim is not None:
            kernels, head_dim = self._latent_flops()
        kernels += (3 if config.is_gated else 2) * dense_flops(embed, config.mlp_dim)
        scores = sum(
            attention_flops(length, heads, head_dim, is_causal=True, window=window)
            for window in config.windows
        )
        head = dense_flops(embed, config.vocab_size)
        return batch * length * (config.num_layers * kernels + scores + head)

    def _latent_flops(self) -> tuple[int, int]:
        """Return the FLOPs of a layer's projections, and the mean size of a head's two products."""
        config = self.config
        value = config.value_dim or config.head_dim
        key = config.head_dim + config.rotary_dim
        of_queries = config.query_latent_dim or config.embed_dim
        latent = config.latent_dim or 0
        kernels = dense_flops(of_queries, config.num_heads * key)
        kernels += dense_flops(config.embed_dim, config.query_latent_dim or 0)
        kernels += dense_flops(config.embed_dim, latent + config.rotary_dim)
        kernels += dense_flops(latent, config.num_heads * (config.head_dim + value))
        return kernels + dense_flops(config.num_heads * value, config.embed_dim), (key + value) // 2


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else factor * x
