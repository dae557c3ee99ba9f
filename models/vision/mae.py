"""MAE: an encoder of some patches of an image, and a decoder that predicts those that are hidden.

B batch, H and W pixels, C channels, P patch side, T patches, K of them kept, D embed, F numbers of
a patch: P·P·C.
Source: He et al. 2021 (arXiv:2111.06377).

The batch is that of models/vision/common.py without labels, and has
- `mask_seeds`: uint32[B], what hides patches of each image at random, or in its place
- `noise`: float[B, T]: the patches with the least of it are kept; of equal ones, the first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.flops import dense_flops
from models.layers.basic import LayerNorm, Linear, dropout, param
from models.stack import Stack
from models.text.common import check_heads_divide
from models.vision.common import patchify, unpatchify
from models.vision.vit import (
    Block,
    ImageEncoder,
    PreTrainingConfig,
    ViTConfig,
    encoder_flops,
    position_embedding,
    positions_on,
)
from sharding.logical import constrain

#: Added to the variance of a patch's pixels.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class MAEConfig(PreTrainingConfig):
    """Sizes and regularisation of an MAE."""

    decoder_num_layers: int
    decoder_num_heads: int
    decoder_embed_dim: int
    decoder_mlp_dim: int
    positions: str = "sincos"  # as for the encoder of any model; the decoder's are sincos
    mask_ratio: float = 0.75  # part of the patches that is hidden; what is kept is rounded down
    normalise_targets: bool = True  # pixels of a patch by their own mean and deviation

    def __post_init__(self):
        super().__post_init__()
        check_heads_divide(self, prefix="decoder_")
        if self.decoder_embed_dim % 4:
            raise ValueError(
                f"model.decoder_embed_dim={self.decoder_embed_dim} must be a multiple of 4, for "
                "positions by sines and cosines"
            )
        if self.normalise_targets and self.patch_size**2 * self.num_channels < 2:
            raise ValueError(
                "model.normalise_targets=True needs patches of more than one number, but "
                f"model.patch_size={self.patch_size} and model.num_channels={self.num_channels}; "
                "choose larger patches, or False"
            )
        if not 0 <= self.mask_ratio <= 1:
            raise ValueError(f"model.mask_ratio={self.mask_ratio} must lie in [0, 1]")
        rows, columns = self.grid
        kept = self.num_kept(rows * columns)
        if not 0 < kept < rows * columns:
            raise ValueError(
                f"model.mask_ratio={self.mask_ratio} keeps {kept} of {rows * columns} patches; "
                "choose one that keeps some and hides some"
            )

    @property
    def decoder(self) -> ViTConfig:
        """The ViT whose blocks and positions are the decoder's."""
        return dataclasses.replace(
            self.encoder,
            num_layers=self.decoder_num_layers,
            num_heads=self.decoder_num_heads,
            embed_dim=self.decoder_embed_dim,
            mlp_dim=self.decoder_mlp_dim,
            positions="sincos",
            drop_path=0.0,  # which grows with the layers of one stack alone
        )

    def num_kept(self, num_patches: int) -> int:
        """Returns K."""
        return int(num_patches * (1 - self.mask_ratio))


class MAE(ImageEncoder):
    """An encoder of images that learns to predict what is hidden of them."""

    Config = MAEConfig
    stacks = ("encoder", "decoder")
    objectives = ("image_reconstruction",)
    not_decayed = (*ImageEncoder.not_decayed, "mask_token", "decoder_position_embedding")

    def __init__(self, config: MAEConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.config, decoder = config, config.decoder
        embed, layers = decoder.embed_dim, decoder.num_layers
        normal = jax.nn.initializers.normal(config.init_stddev)
        stddev = config.kernel_stddev(config.embed_dim, embed)
        self.decoder_embedding = Linear(
            {"embed": config.embed_dim}, {"_embed": embed}, stddev=stddev, rngs=rngs
        )
        self.mask_token = param(normal, rngs, (1, 1, embed), (None, None, "embed"))
        self.decoder_position_embedding = position_embedding(decoder, rngs=rngs)
        self.decoder = Stack(lambda rngs: Block(decoder, layers, rngs=rngs), layers, rngs=rngs)
        self.decoder_norm = LayerNorm(embed, epsilon=config.layer_norm_epsilon, rngs=rngs)
        values = config.patch_size**2 * config.num_channels
        stddev = config.kernel_stddev(embed, values)
        self.prediction = Linear({"embed": embed}, {"_values": values}, stddev=stddev, rngs=rngs)

    def embed(self, batch: dict) -> jax.Array:
        """Returns activations `[B, 1 + K, D]`: the class token and the patches that are kept."""
        first, patches_BTD = self.tokens(batch["images"])
        kept_BK = self._order(batch)[:, : self._num_kept(batch)]
        x_BTD = jnp.concatenate([first, _take(patches_BTD, kept_BK)], axis=1)
        x_BTD = dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))
        return constrain(x_BTD, "batch", "seq", "act_embed")

    def before_decoder(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Returns `[B, 1 + T, D]`, D the decoder's: all patches in their places in the image."""
        x_BTD = self.decoder_embedding(self.final_norm(x_BTD))
        order_BT = self._order(batch)
        size, length = order_BT.shape
        hidden = (size, length - self._num_kept(batch), x_BTD.shape[-1])
        hidden_BTD = jnp.broadcast_to(self.mask_token[...], hidden)
        patches_BTD = jnp.concatenate([x_BTD[:, 1:], hidden_BTD], axis=1)
        patches_BTD = _take(patches_BTD, jnp.argsort(order_BT, axis=1))
        positions = positions_on(self.decoder_position_embedding[...], self._grid(batch["images"]))
        x_BTD = jnp.concatenate([x_BTD[:, :1], patches_BTD], axis=1) + positions
        return constrain(x_BTD, "batch", "seq", "act_embed")

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Returns (sum of weighted losses, sum of weights, no further metrics).

        The loss of an image is the mean squared error of the pixels of its hidden patches.
        """
        predictions_BTF = self._predictions(x_BTD)
        targets_BTF = self._patches(batch["images"])
        if self.config.normalise_targets:
            mean, deviation = _statistics(targets_BTF)
            targets_BTF = (targets_BTF - mean) / deviation
        errors_BT = jnp.mean(jnp.square(predictions_BTF - targets_BTF), axis=-1)
        losses_B = jnp.mean(errors_BT, axis=1, where=self._is_hidden(batch))
        weights_B = batch["weights"].astype(losses_B.dtype)
        return jnp.sum(losses_B * weights_B), jnp.sum(weights_B), {}

    def forward_flops(self, shapes: dict) -> int:
        """Returns matrix-product FLOPs of a batch's forward pass; see models/flops.py."""
        config, images = self.config, shapes["images"]
        rows, columns = self._grid(images)
        patches, values = rows * columns, config.patch_size**2 * config.num_channels
        seen = 1 + config.num_kept(patches)
        total = patches * dense_flops(values, config.embed_dim)
        total += encoder_flops(config, seen)
        total += seen * dense_flops(config.embed_dim, config.decoder_embed_dim)
        total += encoder_flops(config.decoder, 1 + patches)
        total += patches * dense_flops(config.decoder_embed_dim, values)
        return images.shape[0] * total

    def __call__(
        self, images: jax.Array, noise: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (predictions, float32[B, T, F], of what the loss compares; bool[B, T], hidden).

        Args:
          images: `[B, H, W, C]`, uint8 or normalised.
          noise: float[B, T], what says which patches are hidden; None: that of seeds 0 to B - 1.
        """
        mask = {"mask_seeds": jnp.arange(len(images), dtype=jnp.uint32)}
        batch = {"images": images, **(mask if noise is None else {"noise": noise})}
        x_BTD = self.encoder(self.embed(batch), batch)
        x_BTD = self.decoder(self.before_decoder(x_BTD, batch), batch)
        return self._predictions(x_BTD), self._is_hidden(batch)

    def reconstructions(
        self, images: jax.Array, noise: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns images whose hidden patches are (of the mean colour, predicted).

        Both are float32[B, H, W, C], pixels from 0 to 1.

        Predictions of normalised pixels are shown with the mean and deviation of the hidden ones.
        Pixels that fill no patch at the end are left out.

        Args:
          images, noise: as for `__call__`.
        """
        predictions_BTF, is_hidden_BT = self(images, noise)
        seen_BTF, side = self._patches(images), self.config.patch_size
        if self.config.normalise_targets:
            mean, deviation = _statistics(seen_BTF)
            predictions_BTF = predictions_BTF * deviation + mean

        def joined(hidden_BTF: jax.Array) -> jax.Array:
            patches = jnp.where(is_hidden_BT[..., None], hidden_BTF, seen_BTF)
            patches = patches.reshape(len(images), *self._grid(images), side, side, -1)
            return jnp.clip(self.config.pixels(unpatchify(patches)), 0, 1)

        return joined(jnp.zeros_like(seen_BTF)), joined(predictions_BTF)

    def _grid(self, images: jax.Array) -> tuple[int, int]:
        """Returns rows and columns of patches."""
        return images.shape[1] // self.config.patch_size, images.shape[2] // self.config.patch_size

    def _num_kept(self, batch: dict) -> int:
        rows, columns = self._grid(batch["images"])
        return self.config.num_kept(rows * columns)

    def _order(self, batch: dict) -> jax.Array:
        """Returns the numbers of the patches of each image, those that are kept first, int[B, T].

        It is computed anew wherever it is needed: what flows between a model's parts is floating.
        """
        if "noise" in batch:
            return jnp.argsort(batch["noise"], axis=1)
        rows, columns = self._grid(batch["images"])

        def noise(seed: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.key(seed), (rows * columns,), jnp.float32)

        return jnp.argsort(jax.vmap(noise)(batch["mask_seeds"]), axis=1)

    def _is_hidden(self, batch: dict) -> jax.Array:
        """Returns bool[B, T]."""
        return jnp.argsort(self._order(batch), axis=1) >= self._num_kept(batch)

    def _patches(self, images: jax.Array) -> jax.Array:
        """Returns the normalised pixels of each patch, `[B, T, F]`, in float32 or wider."""
        wide = jnp.promote_types(self.mask_token.dtype, jnp.float32)
        cut = patchify(self.config.normalised(images, wide), self.config.patch_size)
        return cut.reshape(len(images), cut.shape[1] * cut.shape[2], -1)

    def _predictions(self, x_BTD: jax.Array) -> jax.Array:
        predictions = self.prediction(self.decoder_norm(x_BTD[:, 1:]))
        return predictions.astype(jnp.promote_types(predictions.dtype, jnp.float32))


def _take(x_BTD: jax.Array, numbers_BT: jax.Array) -> jax.Array:
    """Returns the rows of each image that the numbers name."""
    return jnp.take_along_axis(x_BTD, numbers_BT[..., None], axis=1, mode="promise_in_bounds")


def _statistics(patches_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (mean, standard deviation) of the pixels of each patch, `[B, T, 1]`."""
    mean = jnp.mean(patches_BTF, axis=-1, keepdims=True)
    variance = jnp.var(patches_BTF, axis=-1, keepdims=True, ddof=1)
    return mean, jnp.sqrt(variance + _EPSILON)
