"""Products in float8, compared with numpy and ml_dtypes in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from models.layers import float8
from models.layers.basic import Linear, float8_kernels, use_float8
from models.layers.transformer import MLP

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def rounded(x, dtype, scale):
    """Round to float8 with numpy, and return float64."""
    x = np.asarray(x, np.float64) / scale
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype).astype(np.float64) * scale


def fitting_scale(x, dtype):
    """Return the smallest power of two by which x can be divided without clipping."""
    return 2.0 ** np.ceil(np.log2(np.abs(np.asarray(x, np.float64)).max() / LARGEST[dtype]))


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (24, 4, 8), dtype) * 3
    kernel = jax.random.normal(keys[1], (4, 8, 48), dtype) * 0.02
    dy = jax.random.normal(keys[2], (24, 48), dtype) * 1e-3
    return x, kernel, dy


def scaling(exponents):
    """Return the scales 2^exponents of input, gradient and kernel, as a layer receives them."""
    scales = jnp.zeros((3, float8.NUM_BINS)).at[:, 0].set(2.0 ** jnp.asarray(exponents))
    return scales[0], scales[1:]


def check_products(x, kernel, dy, given, scales):
    y, vjp = jax.vjp(lambda x, kernel, given: float8.product(x, kernel, 2, given), x, kernel, given)
    (dx, dkernel, _) = vjp(dy)
    x8 = rounded(x, E4M3, scales[0]).reshape(24, 32)
    dy8 = rounded(dy, E5M2, scales[1])
    kernel8 = rounded(kernel, E4M3, scales[2]).reshape(32, 48)
    np.testing.assert_allclose(y, x8 @ kernel8, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx.reshape(24, 32), dy8 @ kernel8.T, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(dkernel.reshape(32, 48), x8.T @ dy8, rtol=1e-5, atol=1e-8)


def test_current_scaling_rounds_all_operands_of_the_three_products():
    x, kernel, dy = arrays()
    scales = [fitting_scale(x, E4M3), fitting_scale(dy, E5M2), fitting_scale(kernel, E4M3)]
    check_products(x, kernel, dy, None, scales)
    exact = np.asarray(x).reshape(24, 32) @ np.asarray(kernel).reshape(32, 48)
    error = np.abs(np.asarray(float8.product(x, kernel, 2, None)) - exact).max()
    assert 1e-4 < error < 0.1 * np.abs(exact).max()  # rounded, but not much


@pytest.mark.parametrize("exponents", [(-3, -20, -11), (-8, -30, -16)])
def test_delayed_scaling_uses_the_given_scales_and_clips(exponents):
    x, kernel, dy = arrays()
    check_products(x, kernel, dy, scaling(exponents), [2.0**e for e in exponents])


@pytest.mark.drawn(6)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("operand", ["x", "kernel", "dy"])
def test_product_is_nonfinite_wherever_it_is_in_float64(operand, is_delayed, value):
    tensors = dict(zip(("x", "kernel", "dy"), map(np.array, arrays()), strict=True))
    tensors[operand][(2,) * tensors[operand].ndim] = value
    x, kernel, dy = (jnp.asarray(tensor) for tensor in tensors.values())
    given = None
    if is_delayed:
        scale = float8.kernel_scales(kernel[None], jnp.float32)
        rows = float8.scaling_of(jnp.zeros((1, 2, float8.NUM_BINS)), scale)[0]
        given = (rows[0], rows[1:])
    y, vjp = jax.vjp(lambda x, kernel: float8.product(x, kernel, 2, given), x, kernel)
    dx, dkernel = vjp(dy)
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x64 = wide["x"].reshape(24, 32)
    kernel64 = wide["kernel"].reshape(32, 48)
    with np.errstate(invalid="ignore"):
        expected = (x64 @ kernel64, wide["dy"] @ kernel64.T, x64.T @ wide["dy"])
    for found, product in zip((y, dx, dkernel), expected, strict=True):
        is_finite = np.isfinite(np.asarray(found).reshape(product.shape))
        assert not is_finite[~np.isfinite(product)].any()


def test_products_keep_bfloat16():
    x, kernel, dy = arrays(jnp.bfloat16)
    y, vjp = jax.vjp(lambda x, kernel: float8.product(x, kernel, 2, None), x, kernel)
    assert [a.dtype for a in (y, *vjp(dy.astype(y.dtype)))] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("is_delayed", [False, True])
def test_products_of_a_batch_share_their_scales(is_delayed):
    """Each is the product with given scales, of the largest values in all of them."""
    x, kernel, dy = (jnp.stack([array, 8 * array[::-1]]) for array in arrays())
    given = scaling((-3, -20, -11)) if is_delayed else None
    y, vjp = jax.vjp(lambda x, kernel: float8.product(x, kernel, 2, given, num_batch=1), x, kernel)
    scales = [
        int(np.log2(fitting_scale(tensor, dtype)))
        for tensor, dtype in ((x, E4M3), (dy, E5M2), (kernel, E4M3))
    ]
    fixed = given or scaling(scales)
    for number in range(2):
        one, one_vjp = jax.vjp(
            lambda x, kernel: float8.product(x, kernel, 2, fixed), x[number], kernel[number]
        )
        expected = (one, *one_vjp(dy[number]))
        for found, each in zip((y, *vjp(dy)), expected, strict=True):
            np.testing.assert_allclose(found[number], each, rtol=1e-5, atol=1e-30)


def needed(x, kernel, dy, exponents):
    """Return the exponents that the gradient of the scaling asks for: of input and gradient."""
    given = scaling(exponents)
    _, vjp = jax.vjp(lambda given: float8.product(x, kernel, 2, given), given)
    ((of_input, own),) = vjp(dy)
    assert not own[1].any()  # the kernel's scale has no history
    for bins in (of_input, own[0]):
        assert set(np.unique(bins)) <= {0, 1} and bins.sum() <= 1
    return [
        int(jnp.argmax(bins)) + float8.LOWEST_EXPONENT if bins.any() else None
        for bins in (of_input, own[0])
    ]


def test_gradient_of_the_scaling_names_the_scales_that_fit():
    x, kernel, dy = arrays()
    large = (2, -18)  # the largest values are rounded, but not clipped
    tensors = [rounded(x, E4M3, 2.0 ** large[0]), rounded(dy, E5M2, 2.0 ** large[1])]
    fitting = [
        int(np.log2(fitting_scale(tensor, dtype)))
        for tensor, dtype in zip(tensors, (E4M3, E5M2), strict=True)
    ]
    assert fitting[0] < large[0] and fitting[1] < large[1]
    assert needed(x, kernel, dy, (*large, -10)) == fitting
    # Smaller scales clip: the next one is to be twice as large.
    assert needed(x, kernel, dy, (fitting[0] - 5, fitting[1] - 1, -10)) == [
        fitting[0] - 4,
        fitting[1],
    ]


def test_extreme_values_have_bins():
    x, kernel, dy = arrays()
    assert needed(0 * x, kernel, 0 * dy, (-2, -6, -10)) == [None, None]
    highest = float8.LOWEST_EXPONENT + float8.NUM_BINS - 1
    assert needed(1e30 * x, kernel, 1e30 * dy, (highest, highest, -10)) == [highest, highest]


def test_history_holds_the_largest_scale_of_its_length():
    bins = jnp.zeros((2, float8.NUM_BINS))
    first = [float8.FIRST_EXPONENTS[name] for name in float8.WITH_HISTORY]
    assert float8.exponents(bins).tolist() == first

    def seen(exponent, count=3.0):
        return jnp.zeros_like(bins).at[:, exponent - float8.LOWEST_EXPONENT].set(count)

    found = []
    for exponent in (-7, -3, -9, -9, -9, -8):
        bins = float8.updated_history(bins, seen(exponent) + seen(-20), length=3)
        found.append(float8.exponents(bins).tolist()[0])
    assert found == [-7, -3, -3, -3, -9, -8]
    # A step in which nothing was seen ages the history.
    assert float8.updated_history(bins, 0 * bins, length=3).max() == 2


def test_misfits_are_counted():
    history = jnp.zeros((5, 1, 2, float8.NUM_BINS))
    zero = -float8.LOWEST_EXPONENT
    history = history.at[..., zero].set(1)  # all scales are 1
    exponents = [(1, 0), (0, -29), (-15, -30), (None, None), (2, 3)]
    seen = jnp.zeros_like(history)
    for layer, pair in enumerate(exponents):
        for row, exponent in enumerate(pair):
            if exponent is not None:
                seen = seen.at[layer, 0, row, zero + exponent].set(1)
    assert [int(n) for n in float8.count_misfits(history, seen)] == [3, 2]


def test_kernel_scales_fit_each_layer():
    kernels = jnp.asarray([[448.0, 1], [449, 2], [3, -900], [0, 0]])
    scales = float8.kernel_scales(kernels, jnp.float32)
    assert scales.tolist() == [1, 2, 4, 2.0**float8.LOWEST_EXPONENT]
    # 449 is 448 in bfloat16.
    assert float8.kernel_scales(kernels, jnp.bfloat16).tolist()[1] == 1


def test_scaling_has_the_scales_in_its_first_column():
    history = jnp.zeros((4, 7, 2, float8.NUM_BINS))
    found = float8.scaling_of(history, jnp.full((4, 7), 0.5))
    assert found.shape == (4, 7, 3, float8.NUM_BINS) and not found[..., 1:].any()
    assert found[0, 0, :, 0].tolist() == [2.0**-2, 2.0**-6, 0.5]


def test_only_layers_with_suitable_sizes_are_in_float8():
    def linear(inputs, outputs, **options):
        return Linear({"embed": inputs}, {"mlp": outputs}, stddev=1.0, rngs=rngs, **options)

    rngs = nnx.Rngs(0)
    sizes = {(16, 32): True, (8, 32): False, (16, 24): False}
    assert {size: bool(linear(*size).float8_weights) for size in sizes} == sizes
    assert not linear(16, 32, can_use_float8=False).float8_weights


def test_layers_of_one_input_share_its_scale():
    mlp: Any = MLP(
        16, 32, activation="silu", is_gated=True, use_bias=False, stddevs=(1, 1), rngs=nnx.Rngs(0)
    )
    paths = [path for (path, _) in float8_kernels(mlp)]
    assert sorted(paths) == ["down", "gate", "up"]
    rows = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 3, float8.NUM_BINS))
    use_float8(mlp, rows)
    assert mlp.gate.scaling[0][0] == mlp.up.scaling[0][0] == paths.index("gate")
    assert mlp.gate.scaling[1][0, 0] != mlp.up.scaling[1][0, 0]
    assert mlp.down.scaling[0][0] == paths.index("down")
