"""Square windows of an image's patches, within which Swin computes attention.

An image of 4 × 4 patches has 2 × 2 windows of side 2. Every other layer shifts the image by half a
window first, so that windows connect patches that were separate before. A shifted window at the
border combines patches that are not neighbours in the image; `regions` tells these apart, so that
attention can be masked:

    patches         shifted by 1    regions
    a b | c d       f g | h e       0 0 | 1 2
    e f | g h       j k | l i       0 0 | 1 2
    ---------       ---------       ---------
    i j | k l       n o | p m       3 3 | 4 5
    m n | o p       b c | d a       6 6 | 7 8

B batch, H and W rows and columns, C embed, N heads, S side of a window, T = S² patches per window.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.basic import Linear, param, unit_length

#: Hidden units of the network that computes biases.
BIAS_DIM = 512


def partition_windows(x_BHWC: jax.Array, side: int, shift: int) -> jax.Array:
    """Shift the rows and columns of images, and divide them into windows.

    Rows and columns are first padded with zeros to multiples of `side`.

    Args:
        x_BHWC: images.
        side: S.
        shift: number of rows and columns that the image moves up and left, cyclically.

    Returns:
        The windows of all examples, `[B·windows, T, C]`.
    """
    batch, height, width, dim = x_BHWC.shape
    x = jnp.pad(x_BHWC, ((0, 0), (0, -height % side), (0, -width % side), (0, 0)))
    x = jnp.roll(x, (-shift, -shift), axis=(1, 2))
    rows = x.shape[1] // side
    columns = x.shape[2] // side
    x = x.reshape(batch, rows, side, columns, side, dim).swapaxes(2, 3)
    return x.reshape(batch * rows * columns, side * side, dim)


def merge_windows(windows: jax.Array, height: int, width: int, shift: int) -> jax.Array:
    """Invert `partition_windows`, dropping its padding.

    Args:
        windows: `[B·windows, T, C]`.
        height: H.
        width: W.
        shift: shift that was passed to `partition_windows`.

    Returns:
        `[B, H, W, C]`.
    """
    side = round(windows.shape[1] ** 0.5)
    rows = -(-height // side)
    columns = -(-width // side)
    dim = windows.shape[2]
    x = windows.reshape(-1, rows, columns, side, side, dim).swapaxes(2, 3)
    x = x.reshape(-1, rows * side, columns * side, dim)
    return jnp.roll(x, (shift, shift), axis=(1, 2))[:, :height, :width]


def regions(height: int, width: int, side: int, shift: int) -> np.ndarray:
    """Return int32[windows, T], equal for patches of a window that are neighbours in the image."""

    def along(size: int) -> np.ndarray:
        places = np.arange(-(-size // side) * side)
        return (places >= len(places) - side).astype(np.int32) + (places >= len(places) - shift)

    down = along(height)
    across = along(width)
    numbers = (3 * down[:, None] + across).astype(np.int32)
    rows = len(down) // side
    columns = len(across) // side
    return numbers.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side * side)


def relative_index(side: int) -> np.ndarray:
    """Return int32[T, T], the number of the offset between each pair of patches of a window."""
    row, column = np.divmod(np.arange(side * side, dtype=np.int32), side)
    down, across = (place[:, None] - place[None, :] + side - 1 for place in (row, column))
    return down * (2 * side - 1) + across


def log_offsets(side: int, pretrained_side: int) -> np.ndarray:
    """Return float64[(2S-1)², 2]: the (rows, columns) of each offset on a logarithmic scale.

    Args:
        side: S.
        pretrained_side: side of the windows whose offsets are scaled to the range from -8 to 8
            before the logarithm.
    """
    offsets = np.moveaxis(np.mgrid[1 - side : side, 1 - side : side], 0, -1).reshape(-1, 2)
    scaled = 8.0 * offsets / max(pretrained_side - 1, 1)
    return np.sign(scaled) * np.log2(np.abs(scaled) + 1) / np.log2(8)


class RelativeBias(nnx.Module):
    """A learned bias of the attention logits for each offset between two patches of a window."""

    def __init__(self, side: int, num_heads: int, *, stddev: float, rngs: nnx.Rngs):
        self.side = side
        shape = ((2 * side - 1) ** 2, num_heads)
        self.table = param(jax.nn.initializers.normal(stddev), rngs, shape, (None, "heads"))

    def __call__(self) -> jax.Array:
        """Return the bias, `[1, N, T, T]`."""
        return self.table[...][relative_index(self.side)].transpose(2, 0, 1)[None]


class ContinuousBias(nnx.Module):
    """Like `RelativeBias`, but a small network computes the bias from the offset.

    Args:
        side: S.
        num_heads: N.
        pretrained_side: side of the windows that the network is or was trained with.
        stddev: standard deviation for initializing its kernels.
        rngs: random keys for the initialization.

    Source: Liu et al. 2021 (arXiv:2111.09883), section 3.3.
    """

    def __init__(
        self, side: int, num_heads: int, pretrained_side: int, *, stddev: float, rngs: nnx.Rngs
    ):
        self.side = side
        self.pretrained_side = pretrained_side
        hidden = {"_hidden": BIAS_DIM}
        options: dict[str, Any] = {"stddev": stddev, "can_use_float8": False, "rngs": rngs}
        self.up = Linear({"_offset": 2}, hidden, **options)
        self.down = Linear(hidden, {"heads": num_heads}, use_bias=False, **options)

    def __call__(self) -> jax.Array:
        """Return the bias, `[1, N, T, T]`."""
        offsets = log_offsets(self.side, self.pretrained_side)
        table = self.down(jax.nn.relu(self.up(jnp.asarray(offsets, self.up.kernel.dtype))))
        bias = table[relative_index(self.side)].transpose(2, 0, 1)[None]
        return 16 * jax.nn.sigmoid(bias)


class UnitNorm(nnx.Module):
    """Divides the last dim by its Euclidean norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an array of the shape and dtype of `x`; the norm is float32 or wider."""
        return unit_length(x).astype(x.dtype)


class ScaledUnitNorm(UnitNorm):
    """`UnitNorm`, followed by a learned factor per head of at most 100."""

    def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.constant(math.log(10.0))
        self.log_scale = param(init, rngs, (num_heads, 1, 1), ("heads", None, None))

    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        """Return an array of the shape and dtype of `x`."""
        scale = jnp.exp(jnp.minimum(self.log_scale[...], math.log(100.0)))
        return super().__call__(x_BTNH) * scale[:, 0].astype(x_BTNH.dtype)
