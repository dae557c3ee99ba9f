"""ViT: an encoder over the patches of an image.

B batch, H and W pixels, C channels, T patches and perhaps a class token, D embed, K labels.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1; stochastic depth: Huang et al. 2016
(arXiv:1603.09382); the mean of patches: He et al. 2021 (arXiv:2111.06377), section A.1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.flops import attention_flops, dense_flops
from models.language import check_heads_divide, check_sizes
from models.layers import LayerNorm, Linear, drop_path, dropout, param
from models.stack import Stack
from models.transformer import MLP, Attention, check_activation
from models.vision import (
    HEADS,
    ImageInputConfig,
    PatchEmbedding,
    check_patch_size,
    label_logits,
    label_loss,
    path_rate,
    resized_positions,
    sincos_positions,
)
from sharding.logical import constrain

POOLS = ("class_token", "mean")
POSITIONS = ("learned", "sincos")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageInputConfig):
    """Sizes, regularisation and head of a ViT."""

    patch_size: int  # pixels of a side
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_dim: int
    head: str = "labels"  # labels | none
    num_labels: int = 2  # of the head "labels"
    pool: str = "class_token"  # what the head reads: class_token | mean, of the patches
    positions: str = "learned"  # learned | sincos, which is fixed
    dropout: float = 0.0  # of embeddings and residual branches, in [0, 1)
    drop_path: float = 0.0  # of the last layer's branches for an image; grows linearly from 0
    label_smoothing: float = 0.0  # while training
    qkv_bias: bool = True
    use_pooler: bool = False  # with head="none": keep a layer that none of our heads reads
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-12
    init_stddev: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self)
        check_heads_divide(self)
        check_patch_size(self)
        check_activation(self.activation)
        for name, choices in (("head", HEADS), ("pool", POOLS), ("positions", POSITIONS)):
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise ValueError(f"model.{name}={value!r} is unknown; choose {', '.join(choices)}")
        if self.positions == "sincos" and self.embed_dim % 4:
            raise ValueError(
                f"model.positions='sincos' needs model.embed_dim={self.embed_dim} to be a multiple "
                "of 4; choose one, or model.positions='learned'"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self.image_size // self.patch_size
        return side, side


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
      num_layers: among which the rate of stochastic depth grows.
    """

    def __init__(self, config: ViTConfig, num_layers: int, *, rngs: nnx.Rngs):
        embed, stddev = config.embed_dim, config.init_stddev
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        self.attention_norm = LayerNorm(embed, **norm)
        self.attention = Attention(
            embed,
            config.num_heads,
            embed // config.num_heads,
            use_bias=config.qkv_bias,
            use_out_bias=True,
            stddevs=(stddev, stddev, stddev),
            rngs=rngs,
        )
        self.mlp_norm = LayerNorm(embed, **norm)
        self.mlp = MLP(
            embed,
            config.mlp_dim,
            activation=config.activation,
            use_bias=True,
            stddevs=(stddev, stddev),
            rngs=rngs,
        )
        self.dropout, self.drop_path, self.num_layers = config.dropout, config.drop_path, num_layers

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        rate = path_rate(self.drop_path, batch["layer"], self.num_layers)
        branch = self.attention(x_BTD, self.attention_norm, is_causal=False)
        branch = dropout(branch, self.dropout, keys, site=0)
        x_BTD += drop_path(branch, rate, keys, site=1)
        branch = dropout(self.mlp(x_BTD, self.mlp_norm), self.dropout, keys, site=2)
        x_BTD += drop_path(branch, rate, keys, site=3)
        return constrain(x_BTD, "batch", "seq", "act_embed")


class ViT(nnx.Module):
    """An encoder of images with a head."""

    Config = ViTConfig

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config, self.objectives = config, HEADS[config.head]
        embed, stddev = config.embed_dim, config.init_stddev
        normal = jax.nn.initializers.normal(stddev)
        num_patches = config.grid[0] * config.grid[1]
        self.patch_embedding = PatchEmbedding(config, config.patch_size, embed, rngs=rngs)
        self.class_token = param(normal, rngs, (1, 1, embed), (None, None, "embed"))
        shape, axes = (1, 1 + num_patches, embed), (None, None, "embed")
        is_learned = config.positions == "learned"
        self.position_embedding = param(normal, rngs, shape, axes) if is_learned else None
        layers = config.num_layers
        self.encoder = Stack(lambda rngs: Block(config, layers, rngs=rngs), layers, rngs=rngs)
        self.final_norm = LayerNorm(embed, epsilon=config.layer_norm_epsilon, rngs=rngs)

        def linear(outputs: int) -> Linear:
            return Linear({"embed": embed}, {"_out": outputs}, stddev=stddev, rngs=rngs)

        has_pooler, has_labels = config.head == "none" and config.use_pooler, config.head != "none"
        self.pooler = linear(embed) if has_pooler else None
        self.classifier = linear(config.num_labels) if has_labels else None

    def embed(self, batch: dict) -> jax.Array:
        """Returns activations `[B, T, D]` of `batch["images"]`, the class token first."""
        patches = self.patch_embedding(batch["images"])
        size, rows, columns, embed = patches.shape
        class_token, positions = self.class_token[...], self._positions((rows, columns))
        first = jnp.broadcast_to(class_token + positions[:, :1], (size, 1, embed))
        x_BTD = patches.reshape(size, rows * columns, embed) + positions[:, 1:]
        x_BTD = jnp.concatenate([first, x_BTD], axis=1)
        x_BTD = dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))
        return constrain(x_BTD, "batch", "seq", "act_embed")

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Returns (sum of weighted losses, sum of weights, sums of metrics) of labels."""
        return label_loss(self._logits(x_BTD), batch, smoothing=self.config.label_smoothing)

    def forward_flops(self, shapes: dict) -> int:
        """Returns matrix-product FLOPs of a batch's forward pass; see models/flops.py."""
        config, embed = self.config, self.config.embed_dim
        batch, height, width, channels = shapes["images"].shape
        patches = (height // config.patch_size) * (width // config.patch_size)
        head_dim = embed // config.num_heads
        kernels = 4 * dense_flops(embed, embed) + 2 * dense_flops(embed, config.mlp_dim)
        scores = attention_flops(1 + patches, config.num_heads, head_dim, is_causal=False)
        total = patches * dense_flops(config.patch_size**2, channels, embed)
        total += (1 + patches) * config.num_layers * (kernels + scores)
        if self.classifier is not None:
            total += dense_flops(embed, config.num_labels)
        return batch * total

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits, float32[B, K], or activations `[B, T, D]` for `head="none"`.

        Args:
          images: `[B, H, W, C]`, uint8 or normalised.
        """
        batch = {"images": images}
        x_BTD = self.encoder(self.embed(batch), batch)
        return self.final_norm(x_BTD) if self.classifier is None else self._logits(x_BTD)

    def _positions(self, grid: tuple[int, int]) -> jax.Array:
        """Returns `[1, T, D]`, those of the class token first."""
        if self.position_embedding is None:
            dtype = self.class_token.dtype
            fixed = jnp.asarray(sincos_positions(*grid, self.config.embed_dim), dtype)
            return jnp.pad(fixed, ((1, 0), (0, 0)))[None]
        table = self.position_embedding[...]
        return jnp.concatenate([table[:, :1], resized_positions(table[0, 1:], grid)[None]], axis=1)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        assert self.classifier is not None
        is_mean = self.config.pool == "mean"
        x_BD = jnp.mean(x_BTD[:, 1:], axis=1) if is_mean else x_BTD[:, 0]
        return label_logits(self.classifier(self.final_norm(x_BD)))
