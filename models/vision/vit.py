"""ViT and DeiT: a Transformer encoder over the patches of an image.

`ImageEncoder` is also the encoder of MAE and MoCo v3, which pre-train it under the same parameter
names.

B batch, H and W pixels, C channels, T patches, with or without the tokens before them, which are a
class token and, in a DeiT, a distillation token; D embed, K labels.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1; stochastic depth: Huang et al. 2016
(arXiv:1603.09382); mean pooling: He et al. 2021 (arXiv:2111.06377), section A.1; distillation
token: Touvron et al. 2020 (arXiv:2012.12877), section 4.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.activations import check_activation
from models.layers.basic import LayerNorm, Linear, param
from models.layers.block import Block
from models.layers.dropout import drop_path, dropout
from models.layers.transformer import MLP, Attention
from models.stack import Stack
from models.text.common import check_choices, check_heads_divide, check_sizes
from models.vision.common import (
    HEADS,
    ImageInputConfig,
    PatchEmbedding,
    check_patch_size,
    drop_path_rate,
    label_logits,
    label_loss,
    resized_positions,
    sincos_positions,
)
from sharding.ops.sequence import (
    local_tokens,
    positions,
    split_here,
    sum_over_tokens,
    whole_length,
)

POOLS = ("class_token", "mean")
#: Initial values of `position_embedding`.
POSITIONS = ("random", "sincos")
#: "token": a token after the class token, which no head reads; "classifier": the same with a
#: classifier of its own, whose logits are averaged with those of the class token.
DISTILLATIONS = ("none", "token", "classifier")
#: Initializations of kernels.
KERNELS = ("normal", "xavier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageEncoderConfig(ImageInputConfig):
    """Sizes and regularization of an encoder of patches."""

    patch_size: int  # pixels per side
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_dim: int
    positions: str = "random"  # initial values: random | sincos; optimizer.frozen keeps them
    kernels: str = "normal"  # initialization: normal with init_stddev | xavier, by kernel size
    dropout: float = 0.0  # rate for embeddings and residual branches, in [0, 1)
    drop_path: float = 0.0  # rate of the last layer's branches per image; grows linearly from 0
    qkv_bias: bool = True
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-12
    init_stddev: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self)
        check_heads_divide(self)
        check_patch_size(self)
        check_activation(self.activation)
        check_choices(self, positions=POSITIONS, kernels=KERNELS)
        if self.positions == "sincos" and self.embed_dim % 4:
            raise ValueError(
                f"model.positions='sincos' needs model.embed_dim={self.embed_dim} to be a multiple "
                "of 4; choose such a multiple, or model.positions='random'"
            )

    def kernel_stddev(self, inputs: int, outputs: int) -> float:
        """Return the initial standard deviation of a kernel with these numbers of features.

        Source: Glorot and Bengio 2010, equation 16, for "xavier".
        """
        return self.init_stddev if self.kernels == "normal" else math.sqrt(2 / (inputs + outputs))

    @property
    def patch_stddev(self) -> float | None:
        """Initial standard deviation of the patch kernel; None for PatchEmbedding's default."""
        if self.kernels == "normal":
            return None
        return self.kernel_stddev(self.patch_size**2 * self.num_channels, self.embed_dim)

    @property
    def num_first_tokens(self) -> int:
        """Number of tokens before the patches."""
        return 1

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and columns of patches."""
        side = self.image_size // self.patch_size
        return side, side


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageEncoderConfig):
    """Sizes, regularization and head of a ViT."""

    head: str = "labels"  # labels | none
    num_labels: int = 2  # for the head "labels"
    pool: str = "class_token"  # input of the head: class_token | mean, which averages patches
    distillation: str = "none"  # DeiT: token | classifier
    label_smoothing: float = 0.0  # during training
    use_pooler: bool = False  # whether head="none" keeps a pooler, which none of our heads reads

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, head=HEADS, pool=POOLS, distillation=DISTILLATIONS)
        if self.pool == "mean" and self.distillation == "classifier":
            raise ValueError(
                "model.distillation='classifier' reads the distillation token, but model.pool="
                "'mean' reads the patches; choose model.pool='class_token', or another "
                "model.distillation"
            )

    @property
    def num_first_tokens(self) -> int:
        """Number of tokens before the patches."""
        return 1 if self.distillation == "none" else 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreTrainingConfig(ImageEncoderConfig):
    """Sizes and regularization of a model that pre-trains the encoder of a ViT."""

    kernels: str = "xavier"

    @property
    def encoder(self) -> ViTConfig:
        """The ViT that is pre-trained."""
        names = [field.name for field in dataclasses.fields(ImageEncoderConfig)]
        return ViTConfig(head="none", **{name: getattr(self, name) for name in names})


class ViTBlock(Block):
    """Attention and an MLP with norms before them, and stochastic depth.

    Args:
        config: sizes and regularization.
        num_layers: number of layers over which the stochastic depth rate grows.
        rngs: random keys for the initialization.
    """

    def __init__(self, config: ImageEncoderConfig, num_layers: int, *, rngs: nnx.Rngs):
        embed = config.embed_dim
        square = config.kernel_stddev(config.embed_dim, config.embed_dim)
        oblong = config.kernel_stddev(embed, config.mlp_dim)
        norm = {"epsilon": config.layer_norm_epsilon, "rngs": rngs}
        super().__init__(
            attention_norm=LayerNorm(embed, **norm),
            attention=Attention(
                embed,
                config.num_heads,
                embed // config.num_heads,
                use_bias=config.qkv_bias,
                use_out_bias=True,
                stddevs=(square, square, square),
                rngs=rngs,
            ),
            mlp_norm=LayerNorm(embed, **norm),
            mlp=MLP(
                embed,
                config.mlp_dim,
                activation=config.activation,
                use_bias=True,
                stddevs=(oblong, oblong),
                rngs=rngs,
            ),
            dropout=config.dropout,
        )
        self.drop_path = config.drop_path
        self.num_layers = num_layers

    def attend(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Attend to all patches; see `Block`."""
        return self.attention(x_BTD, is_causal=False)

    def drop(
        self, branch_BTD: jax.Array, batch: dict, keys: jax.Array | None, number: int
    ) -> jax.Array:
        """Drop single elements, then whole branches; see `Block`."""
        rate = drop_path_rate(self.drop_path, batch["layer"], self.num_layers)
        branch_BTD = dropout(branch_BTD, self.dropout, keys, site=2 * number)
        return drop_path(branch_BTD, rate, keys, site=2 * number + 1)


class ImageEncoder(nnx.Module):
    """Everything in a ViT except its head: an encoder of patches and the tokens before them.

    Models that pre-train it have these parameters under the same names.

    Args:
        config: sizes and regularization.
        block: class of the blocks.
        rngs: random keys for the initialization.
    """

    # As in published implementations.
    not_decayed = ("class_token", "distillation_token", "position_embedding")

    def __init__(
        self, config: ImageEncoderConfig, *, block: type[ViTBlock] = ViTBlock, rngs: nnx.Rngs
    ):
        embed = config.embed_dim
        layers = config.num_layers
        normal = jax.nn.initializers.normal(config.init_stddev)
        self.patch_embedding = PatchEmbedding(
            config, config.patch_size, embed, stddev=config.patch_stddev, rngs=rngs
        )

        def token() -> nnx.Param:
            return param(normal, rngs, (1, 1, embed), (None, None, "embed"))

        self.class_token = token()
        self.position_embedding = position_embedding(config, rngs=rngs)
        self.distillation_token = token() if config.num_first_tokens > 1 else None
        self.encoder = Stack(lambda rngs: block(config, layers, rngs=rngs), layers, rngs=rngs)
        self.final_norm = LayerNorm(embed, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def tokens(self, images_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (first tokens `[B, 1 or 2, D]`, patches `[B, T, D]`) of images, with positions."""
        patches = self.patch_embedding(images_BHWC)
        size, rows, columns, embed = patches.shape
        first = self.class_token[...]
        if self.distillation_token is not None:
            first = jnp.concatenate([first, self.distillation_token[...]], axis=1)
        num = first.shape[1]
        positions = positions_on(self.position_embedding[...], (rows, columns), num_first=num)
        first = jnp.broadcast_to(first + positions[:, :num], (size, num, embed))
        return first, patches.reshape(size, rows * columns, embed) + positions[:, num:]


def position_embedding(config: ImageEncoderConfig, *, rngs: nnx.Rngs) -> nnx.Param:
    """Return a table of positions `[1, F + T, D]`, beginning with those of the F first tokens."""
    embed = config.embed_dim
    num_first = config.num_first_tokens
    (rows, columns) = config.grid
    init = jax.nn.initializers.normal(config.init_stddev)
    if config.positions == "sincos":
        fixed = np.pad(sincos_positions(rows, columns, embed), ((num_first, 0), (0, 0)))[None]

        def init(key, shape, dtype):
            return jnp.asarray(fixed, dtype).reshape(shape)

    return param(init, rngs, (1, num_first + rows * columns, embed), (None, None, "embed"))


def positions_on(table: jax.Array, grid: tuple[int, int], *, num_first: int = 1) -> jax.Array:
    """Resize a table of positions `[1, F + T, D]` to another grid of patches.

    Args:
        num_first: number F of tokens before the patches.
    """
    first = table[:, :num_first]
    return jnp.concatenate([first, resized_positions(table[0, num_first:], grid)[None]], axis=1)


class ViT(ImageEncoder):
    """An image encoder with a head."""

    Config = ViTConfig
    can_split_sequence = True

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.config = config
        self.objectives = HEADS[config.head]
        embed = config.embed_dim
        stddev = config.init_stddev

        def linear(outputs: int) -> Linear:
            return Linear({"embed": embed}, {"_out": outputs}, stddev=stddev, rngs=rngs)

        has_pooler = config.head == "none" and config.use_pooler
        has_labels = config.head != "none"
        has_second = has_labels and config.distillation == "classifier"
        self.pooler = linear(embed) if has_pooler else None
        self.classifier = linear(config.num_labels) if has_labels else None
        self.distillation_classifier = linear(config.num_labels) if has_second else None

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["images"]`, tokens before patches first."""
        x_BTD = local_tokens(jnp.concatenate(self.tokens(batch["images"]), axis=1))
        x_BTD = dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))
        return x_BTD

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted losses, sum of weights, sums of metrics) of the labels."""
        return label_loss(self._logits(x_BTD), batch, smoothing=self.config.label_smoothing)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits, float32[B, K], or activations `[B, T, D]` for `head="none"`.

        Args:
            images: `[B, H, W, C]`, uint8 or normalized.
        """
        batch = {"images": images}
        x_BTD = self.encoder(self.embed(batch), batch)
        return self.final_norm(x_BTD) if self.classifier is None else self._logits(x_BTD)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        assert self.classifier is not None
        config = self.config
        num_first = config.num_first_tokens
        x_BD = _mean_of_patches(x_BTD, num_first) if config.pool == "mean" else x_BTD[:, 0]
        logits = label_logits(self.classifier(self.final_norm(x_BD)))
        if self.distillation_classifier is None:
            return logits
        distilled = label_logits(self.distillation_classifier(self.final_norm(x_BTD[:, 1])))
        return (logits + distilled) / 2


def _mean_of_patches(x_BTD: jax.Array, num_first: int) -> jax.Array:
    """Return the mean of all tokens after the first ones, `[B, D]`."""
    if split_here() is None:
        return jnp.mean(x_BTD[:, num_first:], axis=1)
    is_patch_T1 = (positions(x_BTD.shape[1]) > num_first - 1)[:, None]
    total_BD = sum_over_tokens(jnp.sum(jnp.where(is_patch_T1, x_BTD, 0), axis=1))
    return total_BD / (whole_length(x_BTD.shape[1]) - num_first)
