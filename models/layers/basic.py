"""Layers that several models share.

B batch, T seq, D embed. A parameter's `out_sharding` metadata names its logical axes. Every layer
computes in the dtype of its parameters, so precision is decided where parameters are cast.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.logical import axes_by_hand, offset, sum_over, sum_over_batch

# Parameters are laid out where the train state is built, not one by one as they are made.
nnx.use_eager_sharding(False)


def param(init, rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str | None]) -> nnx.Param:
    """Returns a float32 parameter with a logical axis name per dimension."""
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), out_sharding=tuple(axes))


class Linear(nnx.Module):
    """y = x · kernel + bias, over one or more trailing dims of x.

    Args:
      inputs: logical name -> size of the dims that are contracted, e.g. `{"embed": 64}`.
      outputs: logical name -> size of the dims that come out, e.g. `{"heads": 4, "head_dim": 16}`.
        A name that starts with `_` is not split over the mesh.
      stddev: standard deviation of the kernel's normal initialisation.
      use_bias: whether there is a bias.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        stddev: float,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        axes = [None if name.startswith("_") else name for name in (*inputs, *outputs)]
        init = jax.nn.initializers.normal(stddev)
        self.kernel = param(init, rngs, (*inputs.values(), *outputs.values()), axes)
        zeros, sizes = jax.nn.initializers.zeros, tuple(outputs.values())
        self.bias = param(zeros, rngs, sizes, axes[len(inputs) :]) if use_bias else None
        self.num_inputs = len(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `[*batch, *outputs]` for x `[*batch, *inputs]`."""
        kernel = self.kernel[...]
        batch = x.shape[: x.ndim - self.num_inputs]
        # One flat batch dim: with two of them XLA on CPU writes a transposed copy of the
        # cotangent for the weight gradient.
        flat = x.reshape(math.prod(batch), *x.shape[len(batch) :])
        contracted = tuple(range(self.num_inputs))
        y = jax.lax.dot_general(
            flat, kernel, ((tuple(i + 1 for i in contracted), contracted), ((), ()))
        )
        if self.bias is not None:
            y = y + self.bias[...][None]
        return y.reshape(*batch, *y.shape[1:])


class LayerNorm(nnx.Module):
    """Normalisation of the last dim to mean 0 and variance 1, then scale and bias.

    Args:
      start: of the scale.

    Source: Ba et al. 2016 (arXiv:1607.06450).
    """

    def __init__(self, features: int, *, epsilon: float, start: float = 1.0, rngs: nnx.Rngs):
        self.scale = param(jax.nn.initializers.constant(start), rngs, (features,), (None,))
        self.bias = param(jax.nn.initializers.zeros, rngs, (features,), (None,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the shape and dtype of `x`; statistics are float32 or wider."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        centred = wide - mean
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scale, bias = self.scale[...], self.bias[...]
        return (normal * scale + bias).astype(x.dtype)


class BatchNorm(nnx.Module):
    """Normalisation of every feature to mean 0 and variance 1 over a batch, then scale and bias.

    Statistics are always the batch's own, in evaluations too: no averages of them are kept.

    Args:
      axis: the logical axis of the features, if they are split over the mesh.
      learns: whether there are scale and bias.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167).
    """

    def __init__(
        self, features: int, axis: str | None = None, *, learns: bool = True, rngs: nnx.Rngs
    ):
        ones, zeros, shape = jax.nn.initializers.ones, jax.nn.initializers.zeros, (features,)
        self.scale = param(ones, rngs, shape, (axis,)) if learns else None
        self.bias = param(zeros, rngs, shape, (axis,)) if learns else None

    def __call__(self, x: jax.Array, weights_B: jax.Array) -> jax.Array:
        """Returns the shape and dtype of `x`; statistics are float32 or wider.

        Args:
          x: `[B, ..., features]`. Of all B examples of all devices; those of each place between
            are normalised by themselves.
          weights_B: what each example counts in the statistics.
        """
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        weights = weights_B.astype(wide.dtype).reshape(-1, *[1] * (x.ndim - 1))
        total = sum_over_batch(jnp.sum(weights))
        total = jnp.where(total > 0, total, 1)
        mean = sum_over_batch(jnp.sum(wide * weights, axis=0)) / total
        variance = sum_over_batch(jnp.sum(jnp.square(wide - mean) * weights, axis=0)) / total
        normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
        if self.scale is not None and self.bias is not None:
            normal = normal * self.scale[...] + self.bias[...]
        return normal.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Division of the last dim by its root mean square, then scale.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, features: int, *, epsilon: float, rngs: nnx.Rngs):
        self.scale = param(jax.nn.initializers.ones, rngs, (features,), (None,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the shape and dtype of `x`; statistics are float32 or wider."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]).astype(x.dtype)


def unit_length(x: jax.Array) -> jax.Array:
    """Returns the last dim divided by its length, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def after(elementwise: Callable, function: Callable, x: Any):
    """Returns `function(elementwise(x))`, of which the backward pass keeps `x` alone.

    It computes `elementwise` (a norm, an activation) again, which costs less than the memory
    to keep its result: a scan over layers would write that memory once more and read it back.
    """
    return jax.checkpoint(lambda x: function(elementwise(x)), prevent_cse=False)(x)


def lookup(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows of `table` that the ids name, `[*ids, D]`; V is the logical axis "vocab"."""
    if not axes_by_hand("vocab"):
        return table_VD[ids]
    here = ids - offset("vocab", table_VD.shape[0])
    is_here = (here >= 0) & (here < table_VD.shape[0])
    rows = jnp.where(is_here[..., None], table_VD[jnp.where(is_here, here, 0)], 0)
    return sum_over("vocab", rows)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, site: int = 0) -> jax.Array:
    """Returns `x` with elements zeroed at `rate` and the rest scaled by 1 / (1 - rate).

    Each example draws from its own key, so the mask depends neither on the mesh nor on how the
    batch is cut into microbatches.

    Args:
      x: float[B, ...].
      rate: probability of zeroing, in [0, 1).
      keys: key[B], one per example; None switches dropout off.
      site: number of this dropout among those that share `keys`.
    """
    if keys is None or rate == 0.0:
        return x
    keep = jax.vmap(
        lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x.shape[1:])
    )(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def drop_path(x: jax.Array, rate: Any, keys: jax.Array | None, site: int = 0) -> jax.Array:
    """Returns `x` with whole examples zeroed at `rate` and the rest scaled by 1 / (1 - rate).

    Args:
      x: float[B, ...], a residual branch.
      rate: probability of zeroing, in [0, 1), a number or float[].
      keys, site: as for `dropout`.

    Source: Huang et al. 2016 (arXiv:1603.09382), for each example by itself.
    """
    if keys is None or (isinstance(rate, float) and rate == 0.0):
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate))(
        keys
    )
    scaled = (x / (1.0 - rate)).astype(x.dtype)
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), scaled, jnp.zeros((), x.dtype))
