r"""Matrix products in float8, with one scale per tensor.

The three products of a linear layer, y = x·w, dx = dy·wᵀ and dw = xᵀ·dy, take operands in float8:
x and w in e4m3, which has more digits, and dy in e5m2, which has more range. A tensor is divided by
a scale, a power of two, so that its largest value fits into the format:

    x --/ scale--> clip --> e4m3 --\
                                     product --> y, in the dtype of x
    w --/ scale--> clip --> e4m3 --/

XLA replaces a product of operands that were converted back from float8 by a product in float8, if
the GPU has one (cuBLASLt, compute capability 8.9 or higher). Elsewhere the product runs in the
dtype of x, with the same rounding of its operands.

There are two ways to choose a scale:

- **current**: from the largest value of the tensor itself. Each device scales its part of a batch
  by itself, and the tensor is read twice.
- **delayed**: from the largest values in earlier steps, so the tensor is read once. The caller
  passes the scales in arrays, `Scaling`, and the gradients of these arrays say which scales this
  step would have needed. They are counted in bins, one for each exponent that a scale may have.
  Bins of microbatches and devices are added like gradients, and the highest bin that is not zero is
  the maximum of all of them. It is the same on every mesh.

  Largest values are taken from the float8 tensor, which has half the bytes. If values were clipped,
  the next scale is twice as large. The scale of a kernel needs no history: it comes from the whole
  kernel, once per step (`kernel_scales`).

The products of all experts of a layer share their scales.

Source: Micikevicius et al. 2022 (arXiv:2209.05433) for the formats and the choice among them;
NVIDIA's Transformer Engine for delayed scaling and the length of its history.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

#: float[NUM_BINS] for the input, and float[2, NUM_BINS] for gradient and kernel: rows of
#: `scaling_of`. Layers that read the same input can share its row, and then its float8 copy.
Scaling = tuple[jax.Array, jax.Array]

#: The tensors of a linear layer that have a scale, and their formats.
FORMATS = {
    "input": jnp.float8_e4m3fn,
    "gradient": jnp.float8_e5m2,
    "kernel": jnp.float8_e4m3fn,
}
#: Those with a history, which are the first rows of `Scaling`.
WITH_HISTORY = ("input", "gradient")
#: Number of exponents that a scale may have, and the lowest one: scales are 2^-44 to 2^19.
NUM_BINS = 64
LOWEST_EXPONENT = -44
#: Exponents of the scales until a tensor has been seen. Inputs up to 112 and gradients up to 896
#: fit, and values down to 2^-8 and 2^-20 keep all digits.
FIRST_EXPONENTS = {"input": -2, "gradient": -6}

#: Compute capability of the first NVIDIA GPUs that multiply in float8 (Ada).
LOWEST_CAPABILITY = 8.9

# Both formats have 1.75 · 2^n as their largest value, 448 and 57344: as 0.875 · 2^k in the form of
# frexp, k is 9 and 16.
_LARGEST_FRACTION = 0.875
# Exponents between a format's largest value and its smallest one with all digits: if a tensor's
# largest value is so much smaller than it could be, every value has lost digits.
_NUM_EXPONENTS = {jnp.float8_e4m3fn: 15, jnp.float8_e5m2: 30}


def product(
    x: jax.Array,
    kernel: jax.Array,
    num_inputs: int,
    scaling: Scaling | None,
    *,
    num_batch: int = 0,
) -> jax.Array:
    """Return x · kernel with operands rounded to float8, differentiable in the same way.

    Args:
        x: `[*batch, B, *inputs]`, of a floating dtype.
        kernel: `[*batch, *inputs, *outputs]`, of the same dtype.
        num_inputs: number of dims that are contracted.
        scaling: scales for delayed scaling; each row of its gradient has a one in the bin of
            the scale that would have fitted. None: current scaling.
        num_batch: number of dims of a batch of products, which share their scales.

    Returns:
        `[*batch, B, *outputs]`, in the dtype of `x`.
    """
    return _product(x, kernel, scaling, num_inputs, num_batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x, kernel, scaling, num_inputs, num_batch):
    return _forward(x, kernel, scaling, num_inputs, num_batch)[0]


def _forward(x, kernel, scaling, num_inputs, num_batch):
    scales = _current_scales(x, kernel) if scaling is None else _given_scales(scaling)
    batch = tuple(range(num_batch))
    inputs = tuple(range(num_batch, num_batch + num_inputs))
    dims = (tuple(i + 1 for i in inputs), inputs)
    x8 = _narrow(x, scales, "input")
    kernel8 = _narrow(kernel, scales, "kernel")
    y = jax.lax.dot_general(
        _dequantize(x8, scales, "input", x.dtype),
        _dequantize(kernel8, scales, "kernel", x.dtype),
        (dims, (batch, batch)),
    )
    # The backward rounds x and kernel again: they are mostly saved or recomputed for other reasons,
    # and so the float8 copies need not be saved.
    bins = None if scaling is None else _needed_bin(x8, scales["input"])
    return y, (x, kernel, scaling, scales if scaling is None else None, bins)


def _backward(num_inputs, num_batch, residuals, dy):
    (x, kernel, scaling, scales, of_input) = residuals
    if scaling is None:
        scales = scales | {"gradient": _scale_of(dy, "gradient")}
    else:
        scales = _given_scales(scaling)
    tensors = {"input": x, "kernel": kernel, "gradient": dy}
    narrow = {name: _narrow(tensor, scales, name) for name, tensor in tensors.items()}
    wide = {name: _dequantize(tensor, scales, name, dy.dtype) for name, tensor in narrow.items()}
    batch = tuple(range(num_batch))
    outputs = tuple(range(num_batch + num_inputs, kernel.ndim))
    dims = (tuple(range(num_batch + 1, dy.ndim)), outputs)
    dx = jax.lax.dot_general(wide["gradient"], wide["kernel"], (dims, (batch, batch)))
    rows = ((num_batch,), (num_batch,))
    dkernel = jax.lax.dot_general(wide["input"], wide["gradient"], (rows, (batch, batch)))
    if scaling is None:
        return dx, dkernel, None
    bins = {"input": of_input, "gradient": _needed_bin(narrow["gradient"], scales["gradient"])}
    (shared, per_layer) = scaling
    both = jnp.stack([bins["gradient"], jnp.zeros_like(bins["gradient"])])
    return dx, dkernel, (bins["input"].astype(shared.dtype), both.astype(per_layer.dtype))


_product.defvjp(_forward, _backward)


def narrow(x: jax.Array, scaling: Scaling, name: str) -> jax.Array:
    """Return x in the codes that `product` would round it to, uint8.

    Args:
        x: float[...], an input, or a gradient of an output, of a product.
        scaling: scales of this product.
        name: key of WITH_HISTORY.
    """
    return jax.lax.bitcast_convert_type(_narrow(x, _given_scales(scaling), name), jnp.uint8)


def widen(codes: jax.Array, scaling: Scaling, name: str, dtype: Any) -> jax.Array:
    """Return the values of codes from `narrow`, which `product` rounds to the same codes."""
    values = jax.lax.bitcast_convert_type(codes, FORMATS[name])
    return _dequantize(values, _given_scales(scaling), name, dtype)


def scaling_of(history: jax.Array, of_kernel: jax.Array) -> jax.Array:
    """Return the scales of delayed scaling, in the form that `product` takes.

    Args:
        history: float[..., 2, NUM_BINS], as returned by `updated_history`; all zeros at first.
        of_kernel: float[...], the scales of the kernels, as from `kernel_scales`.

    Returns:
        float[..., 3, NUM_BINS], whose first column has the scales, and zeros elsewhere.
    """
    scales = jnp.ldexp(jnp.ones((), history.dtype), exponents(history))
    scales = jnp.concatenate([scales, of_kernel[..., None].astype(history.dtype)], axis=-1)
    return jnp.pad(scales[..., None], [(0, 0)] * scales.ndim + [(0, NUM_BINS - 1)])


def kernel_scales(kernels: jax.Array, dtype: Any) -> jax.Array:
    """Return the smallest scale with which each kernel of a stack fits into its format.

    Args:
        kernels: float[layers, ...].
        dtype: dtype in which the layers receive their kernels.

    Returns:
        float32[layers].
    """
    largest = jnp.max(jnp.abs(kernels), axis=tuple(range(1, kernels.ndim)))
    # Rounding keeps the order of numbers, so this is also the largest of the rounded values.
    return _scale_for(largest.astype(dtype).astype(jnp.float32), FORMATS["kernel"])


def updated_history(history: jax.Array, seen: jax.Array, length: int) -> jax.Array:
    """Return the history after a step.

    Args:
        history: float[..., 2, NUM_BINS], for each bin the number of steps for which it still
            counts.
        seen: array like `history`, from the gradient of the scaling in this step: positive for
            the bins of scales that would have fitted.
        length: number of steps for which a bin counts.
    """
    return jnp.where(seen > 0, jnp.full_like(history, length), jnp.maximum(history - 1, 0))


def exponents(history: jax.Array) -> jax.Array:
    """Return the exponents of the scales, int32[..., 2], taken from the highest bins in use."""
    first = jnp.asarray([FIRST_EXPONENTS[name] for name in WITH_HISTORY], jnp.int32)
    return jnp.where(jnp.any(history > 0, axis=-1), _highest(history), first)


def count_misfits(history: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Count the tensors of a step whose scale did not fit.

    Args:
        history: float[..., 2, NUM_BINS], before the step.
        seen: as for `updated_history`.

    Returns:
        (overflows, underflows), int32[]: tensors in which the largest value of the format occurred,
        so that larger ones were clipped, and tensors in which every value lost digits because the
        scale was too large.
    """
    excess = _highest(seen) - exponents(history)
    was_seen = jnp.any(seen > 0, axis=-1)
    widths = jnp.asarray([_NUM_EXPONENTS[FORMATS[name]] for name in WITH_HISTORY], jnp.int32)
    overflows = jnp.sum(was_seen & (excess > 0), dtype=jnp.int32)
    return overflows, jnp.sum(was_seen & (excess <= -widths), dtype=jnp.int32)


def _highest(bins: jax.Array) -> jax.Array:
    """Return the exponent of the highest bin that is not zero."""
    numbers = jnp.where(bins > 0, jnp.arange(NUM_BINS, dtype=jnp.int32), 0)
    return jnp.max(numbers, axis=-1) + LOWEST_EXPONENT


def _narrow(x: jax.Array, scales: dict[str, jax.Array], name: str) -> jax.Array:
    """Return x / scale in the float8 format of a tensor.

    Infinite values become NaN. Otherwise they would be clipped, and the step would not be skipped.
    """
    dtype = FORMATS[name]
    largest = float(jnp.finfo(dtype).max)
    # The division is exact, and so is the clipping: 448 and 57344 exist in every dtype. Without
    # clipping, larger values would become NaN or infinity.
    inverse = (1 / scales[name]).astype(x.dtype)
    clipped = jnp.clip(x * inverse, -largest, largest)
    # The scale of a kernel with infinite values is NaN already. XLA gathers a kernel in float8 only
    # if nothing but clipping is between the division and the conversion.
    if name in WITH_HISTORY:
        clipped = jnp.where(jnp.isinf(x), jnp.nan, clipped)
    return clipped.astype(dtype)


def _dequantize(
    narrow: jax.Array, scales: dict[str, jax.Array], name: str, dtype: Any
) -> jax.Array:
    """Return narrow · scale. XLA recognizes this, and passes `narrow` to the product."""
    return narrow.astype(dtype) * scales[name].astype(dtype)


def _given_scales(scaling: Scaling) -> dict[str, jax.Array]:
    (shared, per_layer) = scaling
    scales = {"input": shared[0], "gradient": per_layer[0, 0], "kernel": per_layer[1, 0]}
    return {name: scale.astype(jnp.float32) for name, scale in scales.items()}


def _current_scales(x: jax.Array, kernel: jax.Array) -> dict[str, jax.Array]:
    return {"input": _scale_of(x, "input"), "kernel": _scale_of(kernel, "kernel")}


def _scale_of(x: jax.Array, name: str) -> jax.Array:
    """Return the smallest scale, float32[], with which all values of x fit into the format."""
    return _scale_for(jnp.max(jnp.abs(x)).astype(jnp.float32), FORMATS[name])


def _scale_for(largest: jax.Array, dtype: Any) -> jax.Array:
    """Return the smallest scales with which values fit into a format, but at least 2^-44.

    NaN if the largest value is not finite.
    """
    exponent = jnp.maximum(_fitting_exponent(largest, dtype), LOWEST_EXPONENT)
    scale = jnp.ldexp(jnp.ones((), jnp.float32), exponent)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _fitting_exponent(largest: jax.Array, dtype: Any) -> jax.Array:
    """Return the exponents of the smallest scales with which values fit into a format, int32.

    Below LOWEST_EXPONENT for 0.
    """
    fraction, exponent = jnp.frexp(largest)
    _, of_format = jnp.frexp(jnp.float32(jnp.finfo(dtype).max))
    exponent = exponent - of_format + (fraction > _LARGEST_FRACTION)
    return jnp.where(largest > 0, exponent, LOWEST_EXPONENT - 1)


def _needed_bin(narrow: jax.Array, scale: jax.Array) -> jax.Array:
    """Return float32[NUM_BINS] with a one in the bin of the scale that would have fitted.

    Args:
        narrow: tensor in float8.
        scale: its scale. If the format's largest value occurs, twice this scale is needed.

    Returns:
        Zeros if the tensor is so small that the exponent is below LOWEST_EXPONENT.
    """
    dtype = narrow.dtype
    # Without their sign bits, the codes of float8 numbers have the order of their magnitudes.
    codes = jax.lax.bitcast_convert_type(narrow, jnp.uint8) & 0x7F
    code = jnp.max(codes)
    largest = jax.lax.bitcast_convert_type(code, dtype).astype(jnp.float32)
    exponent = _fitting_exponent(largest * scale, dtype)
    exponent += (largest >= float(jnp.finfo(dtype).max)).astype(jnp.int32)
    number = jnp.minimum(exponent - LOWEST_EXPONENT, NUM_BINS - 1)
    return (jnp.arange(NUM_BINS) == number).astype(jnp.float32)
