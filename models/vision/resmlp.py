"""ResMLP: linear layers across the patches of an image and within them, without attention.

The paper's code, resmlp_models.py in github.com/facebookresearch/deit, ends each branch with a
scale that has no bias, and has the same stochastic depth rate in all layers. So does this model.

B batch, H and W pixels, T patches, D embed, K labels.

Source: Touvron et al. 2021 (arXiv:2105.03404), section 2, and their code.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.field_checks import check_choices
from models.layers.basic import Linear, param, recomputed
from models.layers.dropout import drop_path
from models.layers.transformer import MLP, across_tokens
from models.stack import Stack
from models.vision.common import (
    HEADS,
    ImageClassifier,
    ImageInputConfig,
    PatchEmbedding,
    check_patch_size,
)

_STDDEV = 0.02  # initial standard deviation of kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResMLPConfig(ImageInputConfig):
    """Sizes, regularization and head of a ResMLP."""

    patch_size: int  # pixels per side
    num_layers: int
    embed_dim: int
    mlp_dim: int
    layer_scale: float  # initial scale of branches, smaller for deeper models: 0.1 up to 18 layers
    head: str = "labels"  # labels | none
    num_labels: int = 2  # for the head "labels"
    drop_path: float = 0.0  # rate of every layer's branches per image, in [0, 1)
    label_smoothing: float = 0.0  # during training

    def __post_init__(self):
        super().__post_init__()
        check_patch_size(self)
        check_choices(self, head=HEADS)
        if not self.layer_scale > 0:
            raise ValueError(
                f"model.layer_scale={self.layer_scale} must be positive; choose for example 0.1 "
                "for up to 18 layers, 1e-5 for 24, or 1e-6 for more"
            )

    @property
    def num_patches(self) -> int:
        """T, the number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class Affine(nnx.Module):
    """Multiplies each dim by a scale and adds a bias; used in place of a norm."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.scale = param(jax.nn.initializers.ones, rngs, (features,), (None,))
        self.bias = param(jax.nn.initializers.zeros, rngs, (features,), (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an array of the shape and dtype of `x`."""
        return recomputed(lambda x, scale, bias: x * scale + bias)(
            x, self.scale[...], self.bias[...]
        )


class LayerScale(nnx.Module):
    """Multiplies each dim by a scale that is small initially.

    Source: Touvron et al. 2021 (arXiv:2103.17239), section 2.
    """

    def __init__(self, features: int, start: float, *, rngs: nnx.Rngs):
        self.scale = param(jax.nn.initializers.constant(start), rngs, (features,), (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an array of the shape and dtype of `x`."""
        return x * self.scale[...]


class Block(nnx.Module):
    """x + scale(across patches(affine(x))), then x + scale(mlp(affine(x)))."""

    can_split_tokens = True

    def __init__(self, config: ResMLPConfig, *, rngs: nnx.Rngs):
        embed = config.embed_dim
        patches = config.num_patches
        self.patches_affine = Affine(embed, rngs=rngs)
        # Replicated over the axis `model`, like everything between two MLPs. It has only T / 8D of
        # an MLP's FLOPs (6 % for size s12), and splitting it would move x between devices.
        self.across_patches = Linear({"_in": patches}, {"_out": patches}, stddev=_STDDEV, rngs=rngs)
        self.patches_scale = LayerScale(embed, config.layer_scale, rngs=rngs)
        self.mlp_affine = Affine(embed, rngs=rngs)
        self.mlp = MLP(
            embed,
            config.mlp_dim,
            activation="gelu",
            use_bias=True,
            stddevs=(_STDDEV, _STDDEV),
            rngs=rngs,
        )
        self.mlp_scale = LayerScale(embed, config.layer_scale, rngs=rngs)
        self.drop_path = config.drop_path

    def __call__(self, x_BTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block to `x_BTD`; arguments as in models/stack.py."""
        branch = self.patches_scale(across_tokens(self.across_patches, self.patches_affine(x_BTD)))
        x_BTD += drop_path(branch, self.drop_path, keys, site=0)
        branch = self.mlp_scale(self.mlp(self.mlp_affine(x_BTD)))
        x_BTD += drop_path(branch, self.drop_path, keys, site=1)
        return x_BTD


class ResMLP(ImageClassifier):
    """Residual linear layers over patches, with a head."""

    Config = ResMLPConfig

    def __init__(self, config: ResMLPConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        self.patch_embedding = PatchEmbedding(config, config.patch_size, embed, rngs=rngs)
        self.encoder = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.final_affine = Affine(embed, rngs=rngs)
        self.classifier = self.make_classifier(embed, stddev=_STDDEV, rngs=rngs)

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, T, D]` for `batch["images"]`.

        Raises:
            ValueError: if the images do not have the model's size.
        """
        size = batch["images"].shape[1:3]
        side = self.config.image_size
        if size != (side, side):
            raise ValueError(
                f"images of {size[0]} × {size[1]} pixels do not fit model.image_size={side}: each "
                "patch has weights of its own in a ResMLP; resize the images"
            )
        patches = self.patch_embedding(batch["images"])
        return patches.reshape(len(patches), self.config.num_patches, -1)

    def label_features(self, x_BTD: jax.Array) -> jax.Array:
        """Return the mean of the patches, `[B, D]`."""
        return self.final_affine(jnp.mean(x_BTD, axis=1))

    def final_norm(self, x: jax.Array) -> jax.Array:
        """Return the output of the last affine layer."""
        return self.final_affine(x)
