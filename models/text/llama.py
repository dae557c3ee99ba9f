"""The LLaMA family: rotary positions, RMS norms, grouped-query attention and a gated MLP.

One class implements LLaMA 1 to 3, Mistral, Qwen 2, 2.5 and 3, OLMo 2, Granite 3 and Seed-OSS, which
differ in their configs.

B batch, T seq, D embed, V vocab.

Source: Touvron et al. 2023 (arXiv:2302.13971), section 2.2, and (arXiv:2307.09288), section 2.2;
Jiang et al. 2023 (arXiv:2310.06825); Yang et al. 2024 (arXiv:2407.10671), section 2.2, and 2025
(arXiv:2505.09388), section 2.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx

from models.flops import attention_flops, dense_flops
from models.layers.activations import check_activation
from models.layers.basic import NORM_KINDS, LayerNorm, RMSNorm, lookup, param
from models.layers.block import Block
from models.layers.rope import PAIRS, HashableScaling, check_scaling, rope_frequencies, rotate
from models.layers.transformer import MLP, Attention
from models.losses import make_token_loss
from models.stack import Stack
from models.text.causal import CausalModel
from models.text.common import (
    check_head,
    check_sizes,
    padded_vocab,
    positions_by_index,
    segments,
)
from sharding.ops.sequence import whole_length

#: Values of `model.norms`.
_NORMS = ("before", "after", "around", "parallel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and variants of a model of the LLaMA family."""

    vocab_size: int  # number of tokens in the tokenizer's vocab
    max_positions: int  # longest sequence that the model supports
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    embed_dim: int
    mlp_dim: int
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: Mapping[str, Any] | None = None  # see models/layers/rope.py
    rotary_fraction: float = 1.0  # share of a head's features that are rotated
    rotary_pairs: str = "halves"  # halves | neighbours; see models/layers/rope.py
    norm: str = "rms"  # rms | rms_1p | layer | layer_1p | layer_no_bias; see models/layers/basic.py
    activation: str = "silu"  # of the MLP; see models/layers/activations.py
    is_gated: bool = True  # whether the MLP multiplies its activation by a third projection
    qkv_bias: bool = False  # Qwen 2
    out_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # norms of queries and keys, of each head: Qwen 3
    qk_norm_over_heads: bool = False  # these norms are over all heads together: OLMo 2
    qk_norm_by_head: bool = False  # these are layer norms, with a scale for each head: Command-R+
    norms: str = (
        "before"  # of a branch: before | after | around | parallel; see models/layers/block.py
    )
    sliding_window: int | None = None  # tokens that a token sees, including itself: Mistral
    first_windowed_layer: int = 0  # earlier layers have no sliding window
    embedding_scale: float = 1.0  # of the embedding, and of the following: Granite
    attention_scale: float | None = None  # of queries · keys; 1 / √head_dim if None
    residual_scale: float = 1.0  # of the output of attention and of the MLP
    logit_scale: float = 1.0
    tie_embeddings: bool = False  # whether the head uses the token embedding
    vocab_multiple: int = 128  # the vocab is padded to a multiple of this
    rms_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02
    loss: str = "cross_entropy"  # or an import path; see models/losses.py
    head: str = "lm"  # lm | none, which returns activations

    def __post_init__(self):
        check_sizes(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} must divide "
                f"model.num_heads={self.num_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"model.sliding_window={self.sliding_window} must be at least 1, or None"
            )
        last = self.num_layers - 1 if self.sliding_window else 0
        if not 0 <= self.first_windowed_layer <= last:
            raise ValueError(
                f"model.first_windowed_layer={self.first_windowed_layer} must be from 0 to {last}, "
                f"for model.sliding_window={self.sliding_window} and "
                f"model.num_layers={self.num_layers}"
            )
        for name, choices in (("norms", _NORMS), ("norm", NORM_KINDS), ("rotary_pairs", PAIRS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"model.{name}={value!r} is unknown; choose {', '.join(choices)}")
        check_activation(self.activation)
        if not 0.0 < self.rotary_fraction <= 1.0:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} must be more than 0 and at most 1"
            )
        if self.rotary_fraction < 1.0 and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of model.head_dim={self.head_dim} "
                f"is {self.rotary_dim} features, which must be even: they are rotated in pairs"
            )
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
        check_scaling(self.rope_scaling, self.rotary_dim)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", HashableScaling(self.rope_scaling))
        make_token_loss(self.loss)
        check_head(self.head)

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def make_norm(self, features: int, rngs: nnx.Rngs) -> nnx.Module:
        """Return a norm of activations with so many features."""
        return NORM_KINDS[self.norm](features, epsilon=self.rms_norm_epsilon, rngs=rngs)


class _Block(Block):
    def __init__(self, config: LlamaConfig, *, window: int | None, rngs: nnx.Rngs):
        embed = config.embed_dim
        stddev = config.init_stddev
        norm = {"epsilon": config.rms_norm_epsilon, "rngs": rngs}

        def head_norms() -> tuple[nnx.Module, nnx.Module]:
            size = config.head_dim
            if not config.qk_norm_over_heads and not config.qk_norm_by_head:
                return RMSNorm(size, **norm), RMSNorm(size, **norm)
            make = partial(LayerNorm, use_bias=False) if config.qk_norm_by_head else RMSNorm
            queries = make({"heads": config.num_heads, "head_dim": size}, **norm)
            return queries, make({"kv_heads": config.num_kv_heads, "head_dim": size}, **norm)

        def norm_if(*placements: str) -> nnx.Module | None:
            return config.make_norm(embed, rngs) if config.norms in placements else None

        super().__init__(
            attention_norm=norm_if("before", "around", "parallel"),
            attention=Attention(
                embed,
                config.num_heads,
                config.head_dim,
                num_kv_heads=config.num_kv_heads,
                use_bias=config.qkv_bias,
                use_out_bias=config.out_bias,
                stddevs=(stddev, stddev, stddev),
                make_head_norms=head_norms if config.qk_norm else None,
                rngs=rngs,
            ),
            mlp_norm=norm_if("before", "around"),
            mlp=MLP(
                embed,
                config.mlp_dim,
                activation=config.activation,
                is_gated=config.is_gated,
                use_bias=config.mlp_bias,
                stddevs=(stddev, stddev),
                rngs=rngs,
            ),
            norms=config.norms,
            attention_norm_2=norm_if("after", "around"),
            mlp_norm_2=norm_if("after", "around"),
            scale=config.residual_scale,
        )
        self.config = config
        self.window = window

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        config = self.config
        positions = positions_by_index(batch)
        frequencies, factor = rope_frequencies(
            config.rotary_dim,
            config.rope_theta,
            config.rope_scaling,
            num_positions=whole_length(x_BTD.shape[1]),
            max_positions=config.max_positions,
        )
        rotation = {"frequencies": frequencies, "factor": factor, "pairs": config.rotary_pairs}
        return self.attention(
            x_BTD,
            rotate=partial(rotate, positions_BT=positions, **rotation),
            is_causal=True,
            window=self.window,
            segments=segments(batch),
            scale=config.attention_scale,
        )


class Llama(CausalModel):
    """A causal language model."""

    Config = LlamaConfig
    stacks = ("decoder", "windowed_decoder")
    can_share_vocab = True

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = jax.nn.initializers.normal(config.init_stddev)
        vocab = padded_vocab(config.vocab_size, config.vocab_multiple)
        table = (vocab, config.embed_dim), ("vocab", "embed")
        self.token_embedding = param(normal, rngs, *table)

        def stack(num_layers: int, window: int | None) -> Stack | None:
            def make(rngs):
                return _Block(config, window=window, rngs=rngs)

            return Stack(make, num_layers, rngs=rngs) if num_layers else None

        # Blocks of one stack are identical, so layers without a window have a stack of their own.
        window = config.sliding_window
        num_full = config.first_windowed_layer
        self.decoder = stack(num_full or config.num_layers, None if num_full else window)
        self.windowed_decoder = stack(config.num_layers - num_full if num_full else 0, window)
        self.final_norm = config.make_norm(config.embed_dim, rngs)
        has_own_table = config.head == "lm" and not config.tie_embeddings
        self.output_embedding = param(normal, rngs, *table) if has_own_table else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["tokens"]`, int32[B, T]."""
        x_BTD = lookup(self.token_embedding[...], batch["tokens"])
        return _scaled(x_BTD, self.config.embedding_scale)

    def outputs(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the two factors of the logits, `[B, T, D]` and `[V, D]`."""
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
        kernels += (3 if config.is_gated else 2) * dense_flops(embed, config.mlp_dim)
        full = attention_flops(length, heads, head_dim, is_causal=True)
        window = config.sliding_window
        windowed = attention_flops(length, heads, head_dim, is_causal=True, window=window)
        num_full = config.first_windowed_layer if window else config.num_layers
        scores = num_full * full + (config.num_layers - num_full) * windowed
        head = dense_flops(embed, config.vocab_size)
        return batch * length * (config.num_layers * kernels + scores + head)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else factor * x
