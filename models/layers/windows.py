"""Square windows of an image's patches, as Swin attends to them.

B batch, H and W rows and columns, C embed, N heads, S side of a window, T = S² its patches.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.basic import Linear, param, unit_length

#: Hidden units of the network that makes biases.
BIAS_DIM = 512


def partition_windows(x_BHWC: jax.Array, side: int, shift: int) -> jax.Array:
    """Returns the windows of all examples, `[B·windows, T, C]`, once rows and columns are shifted.

    Rows and columns are padded with zeros to multiples of `side` first.
    """
    batch, height, width, dim = x_BHWC.shape
    x = jnp.pad(x_BHWC, ((0, 0), (0, -height % side), (0, -width % side), (0, 0)))
    x = jnp.roll(x, (-shift, -shift), axis=(1, 2))
    rows, columns = x.shape[1] // side, x.shape[2] // side
    x = x.reshape(batch, rows, side, columns, side, dim).swapaxes(2, 3)
    return x.reshape(batch * rows * columns, side * side, dim)


def merge_windows(windows: jax.Array, height: int, width: int, shift: int) -> jax.Array:
    """Returns `[B, H, W, C]` of what `partition_windows` returned; padding is left out."""
    side = round(windows.shape[1] ** 0.5)
    rows, columns, dim = -(-height // side), -(-width // side), windows.shape[2]
    x = windows.reshape(-1, rows, columns, side, side, dim).swapaxes(2, 3)
    x = x.reshape(-1, rows * side, columns * side, dim)
    return jnp.roll(x, (shift, shift), axis=(1, 2))[:, :height, :width]


def regions(height: int, width: int, side: int, shift: int) -> np.ndarray:
    """Returns int32[windows, T]: numbers that differ where a shift brought strangers together."""

    def along(size: int) -> np.ndarray:
        places = np.arange(-(-size // side) * side)
        return (places >= len(places) - side).astype(np.int32) + (places >= len(places) - shift)

    down, across = along(height), along(width)
    numbers = (3 * down[:, None] + across).astype(np.int32)
    rows, columns = len(down) // side, len(across) // side
    return numbers.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side * side)


def relative_index(side: int) -> np.ndarray:
    """Returns int32[T, T]: the number of the offset of one patch of a window from another."""
    row, column = np.divmod(np.arange(side * side, dtype=np.int32), side)
    down, across = (place[:, None] - place[None, :] + side - 1 for place in (row, column))
    return down * (2 * side - 1) + across


def log_offsets(side: int, pretrained_side: int) -> np.ndarray:
    """Returns float64[(2S-1)², 2]: (rows, columns) of each offset, on a logarithmic scale.

    Args:
      pretrained_side: the side of windows whose offsets reach from -1 to 1 on it.
    """
    offsets = np.moveaxis(np.mgrid[1 - side : side, 1 - side : side], 0, -1).reshape(-1, 2)
    scaled = 8.0 * offsets / max(pretrained_side - 1, 1)
    return np.sign(scaled) * np.log2(np.abs(scaled) + 1) / np.log2(8)


class RelativeBias(nnx.Module):
    """What is added to the logits of two patches of a window: a number for each offset."""

    def __init__(self, side: int, num_heads: int, *, stddev: float, rngs: nnx.Rngs):
        self.side, shape = side, ((2 * side - 1) ** 2, num_heads)
        self.table = param(jax.nn.initializers.normal(stddev), rngs, shape, (None, "heads"))

    def __call__(self) -> jax.Array:
        """Returns `[1, N, T, T]`."""
        return self.table[...][relative_index(self.side)].transpose(2, 0, 1)[None]


class ContinuousBias(nnx.Module):
    """The same, made of the offsets by a small network.

    Args:
      side: S.
      num_heads: N.
      pretrained_side: the side of the windows that the network was trained with, or is.
      stddev: of its kernels at the start.

    Source: Liu et al. 2021 (arXiv:2111.09883), section 3.3.
    """

    def __init__(
        self, side: int, num_heads: int, pretrained_side: int, *, stddev: float, rngs: nnx.Rngs
    ):
        self.side, self.pretrained_side, hidden = side, pretrained_side, {"_hidden": BIAS_DIM}
        options: dict[str, Any] = {"stddev": stddev, "rngs": rngs}
        self.up = Linear({"_offset": 2}, hidden, **options)
        self.down = Linear(hidden, {"heads": num_heads}, use_bias=False, **options)

    def __call__(self) -> jax.Array:
        """Returns `[1, N, T, T]`."""
        offsets = log_offsets(self.side, self.pretrained_side)
        table = self.down(jax.nn.relu(self.up(jnp.asarray(offsets, self.up.kernel.dtype))))
        bias = table[relative_index(self.side)].transpose(2, 0, 1)[None]
        return 16 * jax.nn.sigmoid(bias)


class UnitNorm(nnx.Module):
    """Division of the last dim by its length."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the shape and dtype of `x`; the length is float32 or wider."""
        return unit_length(x).astype(x.dtype)


class ScaledUnitNorm(UnitNorm):
    """That, times a learned number of each head, at most 100."""

    def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.constant(math.log(10.0))
        self.log_scale = param(init, rngs, (num_heads, 1, 1), ("heads", None, None))

    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        scale = jnp.exp(jnp.minimum(self.log_scale[...], math.log(100.0)))
        return super().__call__(x_BTNH) * scale[:, 0].astype(x_BTNH.dtype)
