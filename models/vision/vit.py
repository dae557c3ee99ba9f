"""ViT, DeiT and CLIP's image encoder: a Transformer encoder over the patches of an image.

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

from models.field_checks import check_choices
from models.layers.basic import Linear, param
from models.layers.block import PlainBlock, norm_of
from models.layers.dropout import drop_path, dropout
from models.stack import Stack
from models.text.common import BlockConfig
from models.vision.common import (
    HEADS,
    ImageClassifier,
    ImageInputConfig,
    PatchEmbedding,
    check_patch_size,
    drop_path_rate,
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
class ImageEncoderConfig(BlockConfig, ImageInputConfig):
    """Sizes and regularization of an encoder of patches."""

    patch_size: int  # pixels per side
    positions: str = "random"  # initial values: random | sincos; optimizer.frozen keeps them
    kernels: str = "normal"  # initialization: normal with init_stddev | xavier, by kernel size
    dropout: float = 0.0  # rate for embeddings and residual branches, in [0, 1)
    drop_path: float = 0.0  # rate of the last layer's branches per image; grows linearly from 0
    qkv_bias: bool = True
    patch_bias: bool = True  # whether the embedding of patches has a bias
    first_norm: bool = False  # norm before the first block, as in CLIP
    layer_norm_epsilon: float = 1e-12

    def __post_init__(self):
        super().__post_init__()
        self.check_blocks()
        check_patch_size(self)
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
    classifier_bias: bool = True
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


class ViTBlock(PlainBlock):
    """Attention and an MLP with norms before them, and stochastic depth.

    Args:
        config: sizes and regularization.
        num_layers: number of layers over which the stochastic depth rate grows.
        rngs: random keys for the initialization.
    """

    def __init__(self, config: ImageEncoderConfig, num_layers: int, *, rngs: nnx.Rngs):
        square = config.kernel_stddev(config.embed_dim, config.embed_dim)
        oblong = config.kernel_stddev(config.embed_dim, config.mlp_dim)
        attention = {"use_bias": config.qkv_bias, "use_out_bias": True, "stddev": square}
        mlp = {"stddev": oblong}
        super().__init__(config, is_causal=False, attention=attention, mlp=mlp, rngs=rngs)
        self.drop_path = config.drop_path
        self.num_layers = num_layers

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
        options = {"stddev": config.patch_stddev, "use_bias": config.patch_bias, "rngs": rngs}
        self.patch_embedding = PatchEmbedding(config, config.patch_size, embed, **options)

        def token() -> nnx.Param:
            return param(normal, rngs, (1, 1, embed), (None, None, "embed"))

        self.class_token = token()
        self.position_embedding = position_embedding(config, rngs=rngs)
        self.distillation_token = token() if config.num_first_tokens > 1 else None
        self.first_norm = norm_of(config, rngs=rngs) if config.first_norm else None
        self.encoder = Stack(lambda rngs: block(config, layers, rngs=rngs), layers, rngs=rngs)
        self.final_norm = norm_of(config, rngs=rngs)

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
        patches = patches.reshape(size, rows * columns, embed) + positions[:, num:]
        norm = self.first_norm
        return (first, patches) if norm is None else (norm(first), norm(patches))


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


class ViT(ImageEncoder, ImageClassifier):
    """An image encoder with a head."""

    Config = ViTConfig
    can_split_sequence = True

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.config = config
        embed = config.embed_dim
        options = {"stddev": config.init_stddev, "rngs": rngs}
        has_pooler = config.head == "none" and config.use_pooler
        has_second = config.distillation == "classifier"
        self.pooler = Linear({"embed": embed}, {"_out": embed}, **options) if has_pooler else None
        self.classifier = self.make_classifier(embed, **options)
        second = self.make_classifier(embed, **options) if has_second else None
        self.distillation_classifier = second

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["images"]`, tokens before patches first."""
        x_BTD = local_tokens(jnp.concatenate(self.tokens(batch["images"]), axis=1))
        return dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))

    def label_features(self, x_BTD: jax.Array) -> jax.Array:
        """Return `[B, D]`: the class token, or the mean of the patches."""
        if self.config.pool == "mean":
            return self.final_norm(_mean_of_patches(x_BTD, self.config.num_first_tokens))
        return self.final_norm(x_BTD[:, 0])

    def label_logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits of the labels, float32[B, K]; with two classifiers their mean."""
        logits = super().label_logits(x_BTD)
        if self.distillation_classifier is None:
            return logits
        distilled = self.distillation_classifier(self.final_norm(x_BTD[:, 1]))
        return (logits + distilled.astype(logits.dtype)) / 2


def _mean_of_patches(x_BTD: jax.Array, num_first: int) -> jax.Array:
    """Return the mean of all tokens after the first ones, `[B, D]`."""
    if split_here() is None:
        return jnp.mean(x_BTD[:, num_first:], axis=1)
    is_patch_T1 = (positions(x_BTD.shape[1]) > num_first - 1)[:, None]
    total_BD = sum_over_tokens(jnp.sum(jnp.where(is_patch_T1, x_BTD, 0), axis=1))
    return total_BD / (whole_length(x_BTD.shape[1]) - num_first)
