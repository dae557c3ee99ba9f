"""Shared parts of vision models: batches, patches, positions, and labels.

The batch of a vision model is a dict of

- `images`: uint8[B, H, W, C] from 0 to 255, or floating and already normalized.
- `weights`: float32[B], 0 for rows that only pad the batch.
- `targets`: int32[B], labels, for models with a classification head. If images are mixed, also
  `other_targets`: int32[B], and `target_shares`: float32[B], the share of `targets` in the mix.

B batch, H and W pixels, C channels, P patch side, T patches, D embed, K labels.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.activations import as_float32
from models.layers.basic import Linear
from models.stack import run_stacks
from models.text.common import check_sizes
from sharding.ops.sequence import counted_once

#: `model.head` -> values of `data.objective`. "labels" classifies images, "none" gives activations.
HEADS = {"labels": ("image_classification",), "none": ()}
#: Maximum number of elements in a table of fixed positions: 128 MiB in float64, which is enough for
#: 4,096 patches with an embedding size of 4,096.
MAX_FIXED_POSITIONS = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInputConfig:
    """Size of the images that a model takes, and how their pixels are normalized."""

    image_size: int  # pixels per side
    num_channels: int = 3
    image_mean: tuple[float, ...] = (0.5,)  # one per channel or one for all, for pixels in [0, 1]
    image_stddev: tuple[float, ...] = (0.5,)  # likewise; pixels become (pixel - mean) / stddev

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if isinstance(getattr(self, field.name), list):  # YAML and JSON have no tuples
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        check_sizes(self)
        for name in ("image_mean", "image_stddev"):
            values = getattr(self, name)
            if len(values) not in (1, self.num_channels):
                raise ValueError(
                    f"model.{name}={values} has {len(values)} numbers; give one, or one for each "
                    f"of model.num_channels={self.num_channels}"
                )
        if min(self.image_stddev) <= 0:
            raise ValueError(f"model.image_stddev={self.image_stddev} must be positive")

    def normalised(self, images_BHWC: jax.Array, dtype: Any) -> jax.Array:
        """Return images as the model's input; floating images are already normalized."""
        if jnp.issubdtype(images_BHWC.dtype, jnp.floating):
            return images_BHWC.astype(dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        mean, stddev = (jnp.asarray(v, wide) for v in (self.image_mean, self.image_stddev))
        return ((images_BHWC.astype(wide) / 255 - mean) / stddev).astype(dtype)

    def pixels(self, normalised_BHWC: jax.Array) -> jax.Array:
        """Undo the normalization: return floating pixels, from 0 to 1 if they are an image's."""
        dtype = normalised_BHWC.dtype
        mean, stddev = (jnp.asarray(v, dtype) for v in (self.image_mean, self.image_stddev))
        return normalised_BHWC * stddev + mean


class PatchEmbedding(nnx.Module):
    """A linear layer that is applied to each patch of an image.

    Args:
        config: size and normalization of the images.
        patch_size: P.
        embed_dim: D.
        stddev: standard deviation of the kernel's normal initialization. None selects the
            deviation of a uniform fan-in initialization, which published implementations of ViT,
            Swin and ResMLP use.
        use_bias: whether the linear layer has a bias.
        is_padded: whether to pad pixels at the end that do not fill a patch with zeros, rather than
            to drop them.
        rngs: random keys for the initialization.
    """

    def __init__(
        self,
        config: ImageInputConfig,
        patch_size: int,
        embed_dim: int,
        *,
        stddev: float | None = None,
        use_bias: bool = True,
        is_padded: bool = False,
        rngs: nnx.Rngs,
    ):
        patch = {"_rows": patch_size, "_columns": patch_size, "_channels": config.num_channels}
        if stddev is None:
            stddev = 1 / math.sqrt(3 * patch_size**2 * config.num_channels)
        outputs = {"embed": embed_dim}
        self.linear = Linear(patch, outputs, stddev=stddev, use_bias=use_bias, rngs=rngs)
        self.config = config
        self.patch_size = patch_size
        self.is_padded = is_padded

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Return the embeddings of all patches, `[B, rows, columns, D]`."""
        images = self.config.normalised(images_BHWC, self.linear.kernel.dtype)
        if self.is_padded:
            missing = [(0, -size % self.patch_size) for size in images.shape[1:3]]
            images = jnp.pad(images, ((0, 0), *missing, (0, 0)))
        return self.linear(patchify(images, self.patch_size))


def patchify(images_BHWC: jax.Array, size: int) -> jax.Array:
    """Cut images into patches `[B, rows, columns, P, P, C]`, dropping incomplete ones."""
    batch, height, width, channels = images_BHWC.shape
    rows = height // size
    columns = width // size
    images = images_BHWC[:, : rows * size, : columns * size]
    return images.reshape(batch, rows, size, columns, size, channels).swapaxes(2, 3)


def unpatchify(patches: jax.Array) -> jax.Array:
    """Assemble images `[B, H, W, C]` from patches, as the inverse of `patchify`."""
    batch, rows, columns, size, _, channels = patches.shape
    return patches.swapaxes(2, 3).reshape(batch, rows * size, columns * size, channels)


def check_patch_size(config: Any) -> None:
    """Raise a ValueError unless at least one patch fits into the images of a model's config."""
    if not 1 <= config.patch_size <= config.image_size:
        raise ValueError(
            f"model.patch_size={config.patch_size} must be from 1 to "
            f"model.image_size={config.image_size}"
        )


def sincos_positions(rows: int, columns: int, embed_dim: int) -> np.ndarray:
    """Return fixed two-dimensional positions, float64[rows·columns, D], row by row.

    The first half of D encodes the column, the second half the row. Each half consists of sines
    followed by cosines.

    Raises:
        ValueError: If the table would have more than `MAX_FIXED_POSITIONS` numbers.

    Source: Chen et al. 2021 (arXiv:2104.02057), section 5; He et al. 2021 (arXiv:2111.06377).
    """
    if rows * columns * embed_dim > MAX_FIXED_POSITIONS:
        raise ValueError(
            f"{rows}×{columns} patches × an embedding size of {embed_dim} exceed the "
            f"{MAX_FIXED_POSITIONS} numbers that a table of fixed positions may have; "
            "choose larger patches, a smaller embedding size or learned positions"
        )
    rates = 10000.0 ** -(np.arange(embed_dim // 4) / (embed_dim / 4))

    def along(places: np.ndarray) -> np.ndarray:
        angles = places.reshape(-1, 1) * rates
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    row, column = np.mgrid[:rows, :columns]
    return np.concatenate([along(column), along(row)], axis=1)


def resized_positions(table_TD: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """Resize a table of positions to another grid of patches, by bicubic interpolation.

    Args:
        table_TD: positions of a square grid, row by row.
        grid: (rows, columns) of the new grid.

    Source: Keys 1981 (doi:10.1109/TASSP.1981.1163711) with a = -0.75, as in published code for
    fine-tuning at other resolutions.
    """
    side = round(table_TD.shape[0] ** 0.5)
    if grid == (side, side):
        return table_TD
    down, across = (jnp.asarray(_bicubic(side, n), table_TD.dtype) for n in grid)
    square = table_TD.reshape(side, side, -1)
    return jnp.einsum("rs,ct,std->rcd", down, across, square).reshape(-1, table_TD.shape[1])


def _bicubic(size: int, new_size: int) -> np.ndarray:
    """Return float64[new_size, size], the weight of each old point in each new point."""
    a = -0.75
    weights = np.zeros((new_size, size))
    places = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    for new, place in enumerate(places):
        first = int(np.floor(place)) - 1
        for old in range(first, first + 4):
            x = abs(place - old)
            near = (a + 2) * x**3 - (a + 3) * x**2 + 1
            far = a * (x**3 - 5 * x**2 + 8 * x - 4)
            weights[new, min(max(old, 0), size - 1)] += near if x <= 1 else far
    return weights


def drop_path_rate(last: float, branch: jax.Array, num_branches: int) -> jax.Array | float:
    """Return the stochastic depth rate of a branch, which grows linearly from 0 to `last`.

    Args:
        last: rate of the last branch.
        branch: int32[], number of the branch.
        num_branches: number of branches.
    """
    return last * branch / max(num_branches - 1, 1) if last else 0.0


class ImageClassifier(nnx.Module):
    """An encoder of images with one of HEADS.

    A subclass has a `config`, stacks, `embed`, `final_norm`, and a `classifier` from
    `make_classifier`.
    """

    stacks: tuple[str, ...] = ("encoder",)
    config: Any
    final_norm: Callable[[jax.Array], jax.Array]
    classifier: Linear | None

    @property
    def objectives(self) -> tuple[str, ...]:
        """Values of `data.objective` that the head can be trained with."""
        return HEADS[self.config.head]

    def make_classifier(self, features: int, *, stddev: float, rngs: nnx.Rngs) -> Linear | None:
        """Return the last layer of the head; None for `head="none"`."""
        labels = {"_out": self.config.num_labels}
        has_labels = self.config.head == "labels"
        options = {"stddev": stddev, "use_bias": getattr(self.config, "classifier_bias", True)}
        return Linear({"embed": features}, labels, **options, rngs=rngs) if has_labels else None

    def embed(self, batch: dict) -> jax.Array:
        """Return the activations of `batch["images"]` before the first block."""
        raise NotImplementedError

    def label_features(self, x: jax.Array) -> jax.Array:
        """Return the input of the classifier `[B, D]`, given the activations after all blocks."""
        raise NotImplementedError

    def label_logits(self, x: jax.Array) -> jax.Array:
        """Return logits of the labels, float32[B, K] or wider."""
        assert self.classifier is not None
        return as_float32(self.classifier(self.label_features(x)))

    def head(self, x: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted losses, sum of weights, sums of metrics) of the labels."""
        return label_loss(self.label_logits(x), batch, smoothing=self.config.label_smoothing)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits, float32[B, K], or the last norm of activations for `head="none"`.

        Args:
            images: `[B, H, W, C]`, uint8 or normalized.
        """
        batch = {"images": images}
        x = run_stacks(self, self.embed(batch), batch)
        return self.final_norm(x) if self.classifier is None else self.label_logits(x)


def label_loss(
    logits_BK: jax.Array, batch: dict, *, smoothing: float
) -> tuple[jax.Array, jax.Array, dict]:
    """Return (sum of weighted losses, sum of weights, sums of metrics) of a classifier.

    The loss is the cross-entropy with the batch's targets: one label per image, or shares of two.
    The metrics are `accuracy`, whether `targets` is the label with the largest logit, and, with
    more than five labels, `top5_accuracy`, whether it is among the five largest.

    Args:
        logits_BK: one logit per label.
        batch: has `targets` and `weights`, and optionally `other_targets` and `target_shares`.
        smoothing: share of each target that is spread evenly over all labels, during training only.
    """
    num_labels = logits_BK.shape[1]
    weights = counted_once(batch["weights"].astype(logits_BK.dtype))
    targets = soft_targets(batch, num_labels, logits_BK.dtype)
    if "dropout_keys" in batch:
        targets = (1 - smoothing) * targets + smoothing / num_labels
    losses = -jnp.sum(targets * jax.nn.log_softmax(logits_BK), axis=1)
    rank = label_rank(logits_BK, batch["targets"])
    metrics = {"accuracy": jnp.sum(weights * (rank < 1))}
    if num_labels > 5:
        metrics["top5_accuracy"] = jnp.sum(weights * (rank < 5))
    return jnp.sum(losses * weights), jnp.sum(weights), metrics


def soft_targets(batch: dict, num_labels: int, dtype: Any) -> jax.Array:
    """Return the batch's targets as a distribution over all labels, `[B, K]`."""
    targets = jax.nn.one_hot(batch["targets"], num_labels, dtype=dtype)
    if "other_targets" not in batch:
        return targets
    others = jax.nn.one_hot(batch["other_targets"], num_labels, dtype=dtype)
    shares = batch["target_shares"].astype(dtype)[:, None]
    return shares * targets + (1 - shares) * others


def label_rank(logits_BK: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Return the number of labels ranked before each image's own, int[B].

    Ties go to the first label. Labels whose logit is NaN rank before an image's own, and all do if
    its own is NaN.
    """
    label_logits_B1 = jnp.take_along_axis(logits_BK, labels_B[:, None], axis=1)
    is_after = jnp.arange(logits_BK.shape[1]) >= labels_B[:, None]  # or is its own
    # Count the labels that do not rank after it: comparisons with NaN are false, and must not make
    # a label the first.
    return jnp.sum(
        ~((logits_BK < label_logits_B1) | ((logits_BK == label_logits_B1) & is_after)), axis=1
    )
