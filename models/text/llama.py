"""The LLaMA family: rotary positions, RMS norms, grouped-query attention and a gated MLP.

One class implements LLaMA 1 to 3, Mistral, Qwen 2, 2.5 and 3, OLMo 2, Granite 3 and Seed-OSS, which
differ in their configs.

B batch, T seq, D embed, V vocab.

Source: Touvron et al. 2023 (arXiv:2302.13971), section 2.2, and (arXiv:2307.09288), section 2.2;
Jiang et al. 2023 (arXiv:2310.06825); Yang et al. 2024 (arXiv:2407.10671), section 2.2, and 2025
(arXiv:2505.09388), section 2.
"""

import dataclasses
from functools import partial
from typing import Any, Self

import jax
from flax import nnx

from models.field_checks import check_choices, check_needs
from models.layers.activations import check_activation
from models.layers.basic import NORM_KINDS, LayerNorm, RMSNorm, lookup
from models.layers.block import NORMS, scaled
from models.layers.experts import ExpertsConfig
from models.layers.latent_attention import LatentAttention, LatentConfig
from models.layers.transformer import Attention
from models.losses import VocabLogits
from models.scaling import ScalingConfig
from models.stack import Stack
from models.text.common import CAUSAL_HEADS
from models.text.layer_types import LayerTypesConfig, stacks_of
from models.text.mixture import MixtureBlock, activations_of, feed_forward
from models.text.multi_token import MultiTokenBlock, MultiTokenConfig, MultiTokenModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ExpertsConfig, LatentConfig, LayerTypesConfig, MultiTokenConfig, ScalingConfig):
    """Sizes and variants of a model of the LLaMA family."""

    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    embed_dim: int
    mlp_dim: int
    dense_layers: int = 0  # first layers, which have an MLP of mlp_dim instead of experts
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
    norms: str = "before"  # before | after | around | parallel; see models/layers/block.py
    embedding_scale: float = 1.0  # of the embedding, and of the following: Granite
    attention_scale: float | None = None  # of queries · keys; 1 / √head_dim if None
    attention_softcap: float | None = None  # c of c · tanh(scores / c); Gemma 2
    logit_softcap: float | None = None  # the same for the logits, after logit_scale
    residual_scale: float = 1.0  # of the output of attention and of the MLP
    logit_scale: float = 1.0
    tie_embeddings: bool = False  # whether the head uses the token embedding
    rms_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} must divide "
                f"model.num_heads={self.num_heads}"
            )
        check_choices(self, norms=NORMS, norm=NORM_KINDS, head=CAUSAL_HEADS)
        check_activation(self.activation)
        for name in ("attention_softcap", "logit_softcap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"model.{name}={value} must be positive, or None for no cap")
        has_pairs = self.rotary_dim >= 2 and self.rotary_dim % 2 == 0
        if self.rotary_fraction != 1.0 and not (0.0 < self.rotary_fraction < 1.0 and has_pairs):
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} must be more than 0 and at most 1, "
                f"and its part of model.head_dim={self.head_dim}, {self.rotary_dim} features, "
                "must be even: they are rotated in pairs"
            )
        self.check_latents()
        check_needs(self, qk_norm_over_heads="qk_norm", qk_norm_by_head="qk_norm")
        if self.qk_norm_over_heads and self.qk_norm_by_head:
            raise ValueError(
                "model.qk_norm_over_heads=True and model.qk_norm_by_head=True: choose one of them"
            )
        self.check_rotation()
        self.check_multi_token()
        if not 0 <= self.dense_layers < self.num_layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers} must be at least 0, and less than "
                f"model.num_layers={self.num_layers}"
            )
        self.check_experts("dense_layers")
        self._check_scaling()

    def _check_scaling(self) -> None:
        self.check_scaling()
        for name in ("num_experts", "latent_dim", "mtp_depths"):
            value = getattr(self, name)
            if self.scaling != "none" and value:
                raise ValueError(
                    f"model.scaling={self.scaling!r} has no rule for model.{name}={value}; leave "
                    "one of them out"
                )
        if self.attention_scale is not None and self.base_head_dim is not None:
            raise ValueError(
                f"model.attention_scale={self.attention_scale} and model.base_head_dim="
                f"{self.base_head_dim} both set the scale of scores; leave one of them out"
            )

    @property
    def are_dense(self) -> tuple[bool, ...]:
        """Whether each layer has an MLP instead of experts; blocks of `mtp` are like the last."""
        num_layers = self.num_layers + self.mtp_depths
        num_dense = num_layers if self.num_experts is None else self.dense_layers
        return tuple(number < num_dense for number in range(num_layers))

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
        return self.scaled_scores(self.head_dim + rotary_dim)

    @property
    def explicit(self) -> Self:
        """The config of the same model without `scaling`: with the factors as fields."""
        if self.scaling == "none":
            return self
        return dataclasses.replace(
            self,
            scaling="none",
            base_embed_dim=None,
            base_num_layers=None,
            base_head_dim=None,
            attention_scale=self.score_scale,
            residual_scale=self.residual_scale * self.branch_scale,
            logit_scale=self.logit_scale * self.readout_scale,
        )

    def make_norm(self, features: int, rngs: nnx.Rngs) -> nnx.Module:
        """Return a norm of activations with so many features."""
        return NORM_KINDS[self.norm](features, epsilon=self.rms_norm_epsilon, rngs=rngs)


def _attention(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.Module:
    embed = config.embed_dim
    stddev = config.hidden_stddev
    size = config.head_dim
    if config.latent_dim is not None:
        return LatentAttention(config, rngs=rngs)

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


class _Block(MixtureBlock):
    can_split_sequence = True

    def __init__(self, config: LlamaConfig, kind: tuple[str, bool], *, rngs: nnx.Rngs):
        self.layer_type, is_dense = kind

        def norm_if(*placements: str) -> nnx.Module | None:
            return config.make_norm(config.embed_dim, rngs) if config.norms in placements else None

        super().__init__(
            attention_norm=norm_if("before", "around", "parallel"),
            attention=_attention(config, rngs),
            mlp_norm=norm_if("before", "around"),
            mlp=feed_forward(config, is_dense, rngs),
            norms=config.norms,
            attention_norm_2=norm_if("after", "around"),
            mlp_norm_2=norm_if("after", "around"),
            scale=config.residual_scale * config.branch_scale,
        )
        self.config = config

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        config = self.config
        return self.attention(
            x_BTD,
            rotate=config.rotation(self.layer_type, x_BTD, batch),
            is_causal=True,
            **config.masks(self.layer_type, batch),
            scale=config.score_scale,
            softcap=config.attention_softcap,
        )


class _MultiTokenBlock(MultiTokenBlock, _Block):
    def __init__(self, config: LlamaConfig, kind: tuple[str, bool], *, rngs: nnx.Rngs):
        super().__init__(config, kind, rngs=rngs)
        self.add_joint(config, rngs)


class Llama(MultiTokenModel):
    """A causal language model."""

    Config = LlamaConfig
    stacks = ("decoder", "last_decoder", "mtp")
    not_decayed = ("router_bias", "gate_bias", "up_bias", "down_bias")

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        table = config.embed_dim, config.init_stddev, rngs
        self.token_embedding = config.make_table(*table)
        kinds = [*zip(config.types, config.are_dense, strict=False)]
        self.decoder, self.last_decoder = stacks_of(kinds, partial(_Block, config), rngs=rngs)
        self.final_norm = config.make_norm(config.embed_dim, rngs)
        has_own_table = config.head == "lm" and not config.tie_embeddings
        self.output_embedding = config.make_table(*table) if has_own_table else None
        # Last, so that the other parameters do not depend on it.
        depths = config.mtp_depths
        make = partial(_MultiTokenBlock, config, kinds[-1])
        self.mtp = Stack(lambda rngs: make(rngs=rngs), depths, rngs=rngs) if depths else None

    def embed_tokens(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        return scaled(x_BTD, self.config.embedding_scale)

    def outputs(self, x: Any) -> VocabLogits:
        """Return the logits for the activations after the last block."""
        has_norm = isinstance(x, dict) and "ahead" in x
        x_BTD = activations_of(x)
        return self.logits_of(x_BTD if has_norm else self.final_norm(x_BTD))

    def logits_of(self, x_BTD: jax.Array) -> VocabLogits:
        """Return the logits for activations after the final norm."""
        config = self.config
        table = self.token_embedding if self.output_embedding is None else self.output_embedding
        options = {"vocab_size": config.vocab_size, "softcap": config.logit_softcap}
        scale = config.logit_scale * config.readout_scale
        return VocabLogits(scaled(x_BTD, scale), table[...], **options)
