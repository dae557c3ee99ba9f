"""MAE: encodes a random part of an image's patches, and predicts the hidden ones with a decoder.

    patches     1 2 3 4 5 6 7 8 9        T = 9, of which K = 2 are kept
    encoder     class 3 8                only the class token and the patches that are kept
    decoder     class m m 3 m m m m 8 m  in image order, with a mask token m per hidden patch
    loss        on the predictions at m

The batch is as in models/vision/common.py, without labels but with one of

- `mask_seeds`: uint32[B], seeds that determine which patches of each image are hidden.
- `noise`: float[B, T]: the patches with the smallest noise are kept; ties go to the first.

B batch, H and W pixels, C channels, P patch side, T patches, K of them kept, D embed, F = P·P·C
numbers per patch.

Source: He et al. 2021 (arXiv:2111.06377).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import LayerNorm, Linear, param
from models.layers.dropout import dropout
from models.stack import Stack, run_stacks
from models.text.common import check_heads_divide
from models.vision.common import patchify, unpatchify
from models.vision.vit import (
    ImageEncoder,
    PreTrainingConfig,
    ViTBlock,
    ViTConfig,
    position_embedding,
    positions_on,
)
from sharding.ops.sequence import (
    counted_once,
    local_tokens,
    split_here,
    sum_over_tokens,
    whole_rows,
)

#: Added to the variance of a patch's pixels.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class MAEConfig(PreTrainingConfig):
    """Sizes and regularization of an MAE."""

    decoder_num_layers: int
    decoder_num_heads: int
    decoder_embed_dim: int
    decoder_mlp_dim: int
    positions: str = "sincos"  # positions of the encoder, as in any ViT; the decoder has sincos
    mask_ratio: float = 0.75  # share of hidden patches; the number of kept ones is rounded down
    normalise_targets: bool = True  # normalize each patch's pixels by its own mean and deviation

    def __post_init__(self):
        super().__post_init__()
        check_heads_divide(self, prefix="decoder_")
        if self.decoder_embed_dim % 4:
            raise ValueError(
                f"model.decoder_embed_dim={self.decoder_embed_dim} must be a multiple of 4, for "
                "positions of sines and cosines"
            )
        if self.normalise_targets and self.patch_size**2 * self.num_channels < 2:
            raise ValueError(
                "model.normalise_targets=True needs patches of more than one number, but "
                f"model.patch_size={self.patch_size} and model.num_channels={self.num_channels}; "
                "choose larger patches, or model.normalise_targets=False"
            )
        if not 0 <= self.mask_ratio <= 1:
            raise ValueError(f"model.mask_ratio={self.mask_ratio} must be in [0, 1]")
        rows, columns = self.grid
        num_kept = self.num_kept(rows * columns)
        if not 0 < num_kept < rows * columns:
            raise ValueError(
                f"model.mask_ratio={self.mask_ratio} keeps {num_kept} of {rows * columns} patches; "
                "choose one that keeps some and hides some"
            )

    @property
    def decoder(self) -> ViTConfig:
        """The ViT config whose blocks and positions the decoder uses."""
        return dataclasses.replace(
            self.encoder,
            num_layers=self.decoder_num_layers,
            num_heads=self.decoder_num_heads,
            embed_dim=self.decoder_embed_dim,
            mlp_dim=self.decoder_mlp_dim,
            positions="sincos",
            drop_path=0.0,  # its rate grows over the layers of a single stack, the encoder
        )

    def num_kept(self, num_patches: int) -> int:
        """Return K, the number of patches that are kept."""
        return int(num_patches * (1 - self.mask_ratio))


class MAE(ImageEncoder):
    """An image encoder that learns by predicting hidden patches."""

    Config = MAEConfig
    can_split_sequence = True
    stacks = ("encoder", "decoder")
    objectives = ("image_reconstruction",)
    not_decayed = (*ImageEncoder.not_decayed, "mask_token", "decoder_position_embedding")

    def __init__(self, config: MAEConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.config = config
        decoder = config.decoder
        embed = decoder.embed_dim
        layers = decoder.num_layers
        normal = jax.nn.initializers.normal(config.init_stddev)
        stddev = config.kernel_stddev(config.embed_dim, embed)
        self.decoder_embedding = Linear(
            {"embed": config.embed_dim}, {"_embed": embed}, stddev=stddev, rngs=rngs
        )
        self.mask_token = param(normal, rngs, (1, 1, embed), (None, None, "embed"))
        self.decoder_position_embedding = position_embedding(decoder, rngs=rngs)
        self.decoder = Stack(lambda rngs: ViTBlock(decoder, layers, rngs=rngs), layers, rngs=rngs)
        self.decoder_norm = LayerNorm(embed, epsilon=config.layer_norm_epsilon, rngs=rngs)
        values = config.patch_size**2 * config.num_channels
        stddev = config.kernel_stddev(embed, values)
        self.prediction = Linear({"embed": embed}, {"_values": values}, stddev=stddev, rngs=rngs)

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, 1 + K, D]` of the class token and the patches that are kept."""
        first, patches_BTD = self.tokens(batch["images"])
        kept_BK = self._order(batch)[:, : self._num_kept(batch)]
        x_BTD = local_tokens(jnp.concatenate([first, _take(patches_BTD, kept_BK)], axis=1))
        return dropout(x_BTD, self.config.dropout, batch.get("dropout_keys"))

    def before_decoder(self, x_BTD: jax.Array, batch: dict) -> jax.Array:
        """Return the decoder's input `[B, 1 + T, D]`, with all patches in image order."""
        x_BTD = whole_rows(self.decoder_embedding(self.final_norm(x_BTD)))
        order_BT = self._order(batch)
        size, length = order_BT.shape
        hidden = (size, length - self._num_kept(batch), x_BTD.shape[-1])
        hidden_BTD = jnp.broadcast_to(self.mask_token[...], hidden)
        patches_BTD = jnp.concatenate([x_BTD[:, 1:], hidden_BTD], axis=1)
        patches_BTD = _take(patches_BTD, jnp.argsort(order_BT, axis=1))
        positions = positions_on(self.decoder_position_embedding[...], self._grid(batch["images"]))
        return local_tokens(jnp.concatenate([x_BTD[:, :1], patches_BTD], axis=1) + positions)

    def head(self, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted losses, sum of weights, no further metrics).

        The loss of an image is the mean squared error over the pixels of its hidden patches.
        """
        predictions_BTF = self._predictions(x_BTD[:, 1:] if split_here() is None else x_BTD)
        targets_BTF = self._patches(batch["images"])
        if self.config.normalise_targets:
            mean, deviation = _statistics(targets_BTF)
            targets_BTF = (targets_BTF - mean) / deviation
        is_hidden_BT = self._is_hidden(batch)
        num_hidden_B = jnp.sum(is_hidden_BT, axis=1)
        errors_BT = jnp.mean(jnp.square(predictions_BTF - _of_tokens(targets_BTF)), axis=-1)
        hidden_BT = jnp.where(_of_tokens(is_hidden_BT), errors_BT, 0)
        losses_B = sum_over_tokens(jnp.sum(hidden_BT, axis=1)) / num_hidden_B
        weights_B = counted_once(batch["weights"].astype(losses_B.dtype))
        return jnp.sum(losses_B * weights_B), jnp.sum(weights_B), {}

    def __call__(
        self, images: jax.Array, noise: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Predict the patches of images.

        Args:
            images: `[B, H, W, C]`, uint8 or normalized.
            noise: float[B, T], which determines the hidden patches; None uses seeds 0 to B - 1.

        Returns:
            Predictions float32[B, T, F] of the targets of the loss, and bool[B, T], which patches
            are hidden.
        """
        mask = {"mask_seeds": jnp.arange(len(images), dtype=jnp.uint32)}
        batch = {"images": images, **(mask if noise is None else {"noise": noise})}
        x_BTD = run_stacks(self, self.embed(batch), batch)
        return self._predictions(x_BTD[:, 1:]), self._is_hidden(batch)

    def reconstructions(
        self, images: jax.Array, noise: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return images with hidden patches in the mean colour, and with predicted patches.

        If the targets are normalized, predictions are shown with the true mean and deviation of the
        hidden patches. Pixels at the end that do not fill a patch are dropped.

        Args:
            images: as for `__call__`.
            noise: as for `__call__`.

        Returns:
            Two arrays float32[B, H, W, C], with pixels from 0 to 1.
        """
        predictions_BTF, is_hidden_BT = self(images, noise)
        seen_BTF = self._patches(images)
        side = self.config.patch_size
        if self.config.normalise_targets:
            mean, deviation = _statistics(seen_BTF)
            predictions_BTF = predictions_BTF * deviation + mean

        def joined(hidden_BTF: jax.Array) -> jax.Array:
            patches = jnp.where(is_hidden_BT[..., None], hidden_BTF, seen_BTF)
            patches = patches.reshape(len(images), *self._grid(images), side, side, -1)
            return jnp.clip(self.config.pixels(unpatchify(patches)), 0, 1)

        return joined(jnp.zeros_like(seen_BTF)), joined(predictions_BTF)

    def _grid(self, images: jax.Array) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches."""
        return images.shape[1] // self.config.patch_size, images.shape[2] // self.config.patch_size

    def _num_kept(self, batch: dict) -> int:
        rows, columns = self._grid(batch["images"])
        return self.config.num_kept(rows * columns)

    def _order(self, batch: dict) -> jax.Array:
        """Return the numbers of each image's patches, kept ones first, int[B, T].

        Each method recomputes it, because activations between a model's parts must be floating.
        """
        if "noise" in batch:
            return jnp.argsort(batch["noise"], axis=1)
        rows, columns = self._grid(batch["images"])

        def noise(seed: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.key(seed), (rows * columns,), jnp.float32)

        return jnp.argsort(jax.vmap(noise)(batch["mask_seeds"]), axis=1)

    def _is_hidden(self, batch: dict) -> jax.Array:
        """Return bool[B, T], whether each patch is hidden."""
        return jnp.argsort(self._order(batch), axis=1) >= self._num_kept(batch)
        # The argsort of an order is its inverse: the place of each patch in the order.

    def _patches(self, images: jax.Array) -> jax.Array:
        """Return the normalized pixels of each patch, `[B, T, F]`, in float32 or wider."""
        wide = jnp.promote_types(self.mask_token.dtype, jnp.float32)
        cut = patchify(self.config.normalised(images, wide), self.config.patch_size)
        return cut.reshape(len(images), cut.shape[1] * cut.shape[2], -1)

    def _predictions(self, x_BTD: jax.Array) -> jax.Array:
        predictions = self.prediction(self.decoder_norm(x_BTD))
        return predictions.astype(jnp.promote_types(predictions.dtype, jnp.float32))


def _of_tokens(x: jax.Array) -> jax.Array:
    """Return the part of an array of patches that belongs to this device's tokens.

    The class token, which is before all patches on the first device, has zeros.
    """
    if split_here() is None:
        return x
    return local_tokens(jnp.pad(x, [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)]))


def _take(x_BTD: jax.Array, numbers_BT: jax.Array) -> jax.Array:
    """Select patches of each image by their numbers."""
    return jnp.take_along_axis(x_BTD, numbers_BT[..., None], axis=1, mode="promise_in_bounds")


def _statistics(patches_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (mean, standard deviation) of the pixels of each patch, `[B, T, 1]`."""
    mean = jnp.mean(patches_BTF, axis=-1, keepdims=True)
    variance = jnp.var(patches_BTF, axis=-1, keepdims=True, ddof=1)
    return mean, jnp.sqrt(variance + _EPSILON)
