"""Swin and Swin V2: a pyramid of stages, with attention within windows of the image.

A stage is a stack of pairs of blocks. The first block of a pair has windows that begin at the
corner of the image, the second block has windows that are shifted by half of their side
(models/layers/windows.py has a picture). Between two stages, four neighbouring patches are merged:

    stage 0       H × W patches,      C dims, windows of S × S patches
    stage 1     H/2 × W/2 patches,   2C dims
    stage 2     H/4 × W/4 patches,   4C dims
    stage 3     H/8 × W/8 patches,   8C dims

B batch, H and W rows and columns of patches, C embed, N heads, S side of a window, T = S² patches
per window, K labels.

Source: Liu et al. 2021 (arXiv:2103.14030), section 3; version 2: Liu et al. 2021
(arXiv:2111.09883), section 3.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fields.numbers import MAX_LAYERS
from models.field_checks import check_choices
from models.layers.activations import check_activation
from models.layers.basic import LayerNorm, Linear
from models.layers.dropout import drop_path, dropout
from models.layers.transformer import MLP, Attention
from models.layers.windows import (
    ContinuousBias,
    RelativeBias,
    ScaledUnitNorm,
    UnitNorm,
    merge_windows,
    partition_windows,
    regions,
)
from models.stack import Stack
from models.vision.common import (
    HEADS,
    ImageClassifier,
    ImageInputConfig,
    PatchEmbedding,
    check_patch_size,
    drop_path_rate,
)
from sharding.logical import constrain

MAX_STAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwinConfig(ImageInputConfig):
    """Sizes, regularization and head of a Swin."""

    patch_size: int = 4  # pixels per side
    embed_dim: int  # dims of the first stage
    depths: tuple[int, ...]  # number of blocks per stage, each of them even
    num_heads: tuple[int, ...]  # heads per stage
    window_size: int  # patches per side; stages with fewer patches have one smaller window
    mlp_ratio: float = 4.0
    version: int = 1  # 1 | 2
    #: Version 2: side of the windows in pre-training, per stage; 0 or () if it was the same.
    pretrained_windows: tuple[int, ...] = ()
    head: str = "labels"  # labels | none
    num_labels: int = 2  # for the head "labels"
    dropout: float = 0.0  # rate for embeddings and residual branches, in [0, 1)
    drop_path: float = 0.0  # rate of the last block's branches per image; grows linearly from 0
    label_smoothing: float = 0.0  # during training
    qkv_bias: bool = True
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        check_patch_size(self)
        check_activation(self.activation)
        check_choices(self, head=HEADS)
        if self.version not in (1, 2):
            raise ValueError(f"model.version={self.version} is unknown; choose 1 or 2")
        if not 1 <= self.mlp_ratio * self.embed_dim < math.inf:
            raise ValueError(
                f"model.mlp_ratio={self.mlp_ratio} times model.embed_dim={self.embed_dim} must be "
                "at least 1 and finite; choose for example model.mlp_ratio=4.0"
            )
        self._check_stages()

    def _check_stages(self) -> None:
        if self.version == 1 and self.pretrained_windows:
            raise ValueError(
                f"model.pretrained_windows={self.pretrained_windows} needs model.version=2; "
                "leave it out"
            )
        if min(self.pretrained_windows, default=0) < 0:
            raise ValueError(
                f"model.pretrained_windows={self.pretrained_windows} must not be negative; choose "
                "0 for a stage whose windows had the same size in pre-training"
            )
        if not 1 <= len(self.depths) <= MAX_STAGES:
            raise ValueError(
                f"model.depths={self.depths} has {len(self.depths)} stages; choose from 1 to "
                f"{MAX_STAGES}"
            )
        for name in ("num_heads", *(["pretrained_windows"] if self.pretrained_windows else [])):
            of_stages = getattr(self, name)
            if len(of_stages) != len(self.depths):
                raise ValueError(
                    f"model.{name}={of_stages} and model.depths={self.depths} must both have a "
                    "number for each stage"
                )
        if sum(self.depths) > MAX_LAYERS:
            raise ValueError(
                f"model.depths={self.depths} has more than {MAX_LAYERS} blocks; choose fewer"
            )
        for depth in self.depths:
            if depth < 2 or depth % 2:
                raise ValueError(
                    f"model.depths={self.depths}: a stage consists of pairs of blocks, and {depth} "
                    "is not an even number of them; choose even numbers"
                )
        for stage, heads in enumerate(self.num_heads):
            if heads < 1 or self.width(stage) % heads:
                raise ValueError(
                    f"model.num_heads={self.num_heads}: {heads} must divide the "
                    f"{self.width(stage)} dims of stage {stage}, "
                    f"model.embed_dim={self.embed_dim} × {2**stage}"
                )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.depths)

    @property
    def windows(self) -> tuple[int, ...]:
        """Sides of the windows of all stages."""
        return tuple(self.window(stage)[0] for stage in range(self.num_stages))

    def width(self, stage: int) -> int:
        """Return the number of dims C of a stage."""
        return self.embed_dim * 2**stage

    def mlp_dim(self, stage: int) -> int:
        """Return the number of hidden dims of the MLPs of a stage, rounded down."""
        return int(self.mlp_ratio * self.width(stage))

    def side(self, stage: int) -> int:
        """Return the rows and columns of patches of a stage; incomplete patches are padded."""
        return -(-self.image_size // (self.patch_size * 2**stage))

    def window(self, stage: int) -> tuple[int, int]:
        """Return (side of a window, shift of the windows in the second block of a pair)."""
        side = self.side(stage)
        if self.version == 2:
            # Published code only counts complete patches here, although it pads incomplete ones.
            side = self.image_size // self.patch_size // 2**stage
        if side <= self.window_size:
            return max(side, 1), 0
        return self.window_size, self.window_size // 2


_NORM_EPSILON = 1e-5  # for the norms of the patch embedding and of patch merging


class Block(nnx.Module):
    """Attention within windows, and an MLP.

    Version 1 computes x + branch(norm(x)) for each. Version 2 computes x + norm(branch(x)), has
    cosines as attention logits, and is initialized as the identity.

    Args:
        config: sizes, regularization and version.
        stage: number of its stage.
        second: whether it is the second block of a pair, whose windows are shifted.
        rngs: random keys for the initialization.
    """

    def __init__(self, config: SwinConfig, stage: int, *, second: bool, rngs: nnx.Rngs):
        embed = config.width(stage)
        heads = config.num_heads[stage]
        stddev = config.init_stddev
        self.config = config
        self.second = second
        is_first = config.version == 1
        start = 1.0 if is_first else 0.0
        norm: dict[str, Any] = {"epsilon": config.layer_norm_epsilon, "start": start, "rngs": rngs}
        self.side, shift = config.window(stage)
        self.shift = shift if second else 0

        def cosine() -> tuple[nnx.Module, nnx.Module]:
            return ScaledUnitNorm(heads, rngs=rngs), UnitNorm()

        self.attention_norm = LayerNorm(embed, **norm)
        self.attention = Attention(
            embed,
            heads,
            embed // heads,
            use_bias=config.qkv_bias,
            use_key_bias=config.qkv_bias and is_first,
            use_out_bias=True,
            stddevs=(stddev, stddev, stddev),
            make_head_norms=None if is_first else cosine,
            rngs=rngs,
        )
        if is_first:
            self.bias = RelativeBias(self.side, heads, stddev=stddev, rngs=rngs)
        else:
            pretrained = (config.pretrained_windows or (0,) * config.num_stages)[stage]
            self.bias = ContinuousBias(
                self.side, heads, pretrained or self.side, stddev=stddev, rngs=rngs
            )
        self.mlp_norm = LayerNorm(embed, **norm)
        self.mlp = MLP(
            embed,
            config.mlp_dim(stage),
            activation=config.activation,
            use_bias=True,
            stddevs=(stddev, stddev),
            rngs=rngs,
        )

    def __call__(self, x_BHWC: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block to `x_BHWC`; arguments as in models/stack.py."""
        config = self.config
        first_site = 4 if self.second else 0
        branch_number = 2 * batch["layer"] + int(self.second)
        rate = drop_path_rate(config.drop_path, branch_number, sum(config.depths))

        branches = ((self.attention_norm, self._attend), (self.mlp_norm, self._mlp))
        for number, (norm, function) in enumerate(branches):
            site = first_site + 2 * number
            branch = function(norm(x_BHWC) if config.version == 1 else x_BHWC)
            branch = dropout(branch, config.dropout, keys, site)
            branch = branch if config.version == 1 else norm(branch)
            x_BHWC += drop_path(branch, rate, keys, site + 1)
        return x_BHWC

    def _mlp(self, x_BHWC: jax.Array) -> jax.Array:
        batch, height, width, dim = x_BHWC.shape
        return self.mlp(x_BHWC.reshape(batch, height * width, dim)).reshape(x_BHWC.shape)

    def _attend(self, x_BHWC: jax.Array) -> jax.Array:
        batch, height, width, _ = x_BHWC.shape
        ids = None
        if self.shift:
            of_image = jnp.asarray(regions(height, width, self.side, self.shift))
            ids = jnp.tile(of_image, (batch, 1))
        windows = self.attention(
            partition_windows(x_BHWC, self.side, self.shift),
            is_causal=False,
            bias=self.bias(),
            segments=None if ids is None else (ids, ids),
            scale=None if self.config.version == 1 else 1.0,
        )
        return merge_windows(windows, height, width, self.shift)


class Pair(nnx.Module):
    """A block whose windows begin at the corner, and a block whose windows are shifted."""

    def __init__(self, config: SwinConfig, stage: int, *, rngs: nnx.Rngs):
        self.first = Block(config, stage, second=False, rngs=rngs)
        self.second = Block(config, stage, second=True, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply both blocks to `x_BHWC`; arguments as in models/stack.py."""
        for block in (self.first, self.second):
            x_BHWC = constrain(block(x_BHWC, batch, keys), "batch", None, None, "act_embed")
        return x_BHWC


class PatchMerging(nnx.Module):
    """Merges four neighbouring patches into one patch with twice as many dims.

    Args:
        config: sizes and version.
        stage: number of the stage that follows.
        rngs: random keys for the initialization.
    """

    def __init__(self, config: SwinConfig, stage: int, *, rngs: nnx.Rngs):
        old = 4 * config.width(stage - 1)
        new = config.width(stage)
        self.normed_first = config.version == 1
        stddev = config.init_stddev
        self.norm = LayerNorm(old if self.normed_first else new, epsilon=_NORM_EPSILON, rngs=rngs)
        self.reduction = Linear(
            {"_four": old}, {"embed": new}, stddev=stddev, use_bias=False, rngs=rngs
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the merged patches, `[B, ⌈H / 2⌉, ⌈W / 2⌉, 2C]`."""
        batch, height, width, dim = x_BHWC.shape
        x = jnp.pad(x_BHWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        x = x.reshape(batch, (height + 1) // 2, 2, (width + 1) // 2, 2, dim)
        # Order of the four: upper left, lower left, upper right, lower right.
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(*x.shape[:2], x.shape[3], 4 * dim)
        x = self.reduction(self.norm(x)) if self.normed_first else self.norm(self.reduction(x))
        return constrain(x, "batch", None, None, "act_embed")


class Swin(ImageClassifier):
    """A pyramid of windowed attention with a head."""

    Config = SwinConfig
    #: As in published code: the parameters of attention biases, and the scales of cosines.
    not_decayed = ("bias", "log_scale")

    def __init__(self, config: SwinConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stacks = tuple(f"stage{i}" for i in range(config.num_stages))
        self.patch_embedding = PatchEmbedding(
            config, config.patch_size, config.embed_dim, is_padded=True, rngs=rngs
        )
        self.embedding_norm = LayerNorm(config.embed_dim, epsilon=_NORM_EPSILON, rngs=rngs)

        def merging(stage: int) -> PatchMerging | None:
            return PatchMerging(config, stage, rngs=rngs) if stage < config.num_stages else None

        self.merging1 = merging(1)
        self.merging2 = merging(2)
        self.merging3 = merging(3)

        def stack(stage: int) -> Stack:
            num_pairs = config.depths[stage] // 2
            return Stack(lambda rngs: Pair(config, stage, rngs=rngs), num_pairs, rngs=rngs)

        for stage, name in enumerate(self.stacks):
            setattr(self, name, stack(stage))
        width = config.width(config.num_stages - 1)
        self.final_norm = LayerNorm(width, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.classifier = self.make_classifier(width, stddev=config.init_stddev, rngs=rngs)

    def embed(self, batch: dict) -> jax.Array:
        """Return the activations of the first stage, `[B, H, W, C]`, for `batch["images"]`."""
        x_BHWC = self.embedding_norm(self.patch_embedding(batch["images"]))
        x_BHWC = dropout(x_BHWC, self.config.dropout, batch.get("dropout_keys"))
        return constrain(x_BHWC, "batch", None, None, "act_embed")

    def before_stage1(self, x_BHWC: jax.Array, batch: dict) -> jax.Array:
        """Merge patches before stage 1."""
        assert self.merging1 is not None
        return self.merging1(x_BHWC)

    def before_stage2(self, x_BHWC: jax.Array, batch: dict) -> jax.Array:
        """Merge patches before stage 2."""
        assert self.merging2 is not None
        return self.merging2(x_BHWC)

    def before_stage3(self, x_BHWC: jax.Array, batch: dict) -> jax.Array:
        """Merge patches before stage 3."""
        assert self.merging3 is not None
        return self.merging3(x_BHWC)

    def label_features(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the mean of the patches, `[B, D]`."""
        return jnp.mean(self.final_norm(x_BHWC), axis=(1, 2))
