"""Tests of traced FLOPs, and of regions that declare theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.attention import attend
from models.layers.flops import attention_flops, declare_flops, model_flops, traced_flops

PRODUCT = 2 * 3 * 5 * 5
REGION = 7


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_traced_flops_of_a_product_are_two_per_multiply_add():
    assert traced_flops(jnp.matmul, struct(3, 5), struct(5, 7)) == 2 * 3 * 5 * 7

    def spec(a, b):
        return jnp.einsum("BTNH,BSNH->BNTS", a, b)

    assert traced_flops(spec, struct(2, 3, 4, 5), struct(2, 6, 4, 5)) == 2 * 2 * 4 * 3 * 6 * 5

    def two_dims(a, b):
        return jnp.einsum("TNH,NHD->TD", a, b)

    assert traced_flops(two_dims, struct(3, 4, 5), struct(4, 5, 6)) == 2 * 3 * 4 * 5 * 6
    assert traced_flops(lambda a: jnp.tanh(a) * a + 1.0, struct(3, 5)) == 0


def test_traced_flops_of_scans_are_counted_by_their_length():
    product = 2 * 3 * 5 * 5

    def inner(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=4)[0]

    def outer(x, ws):
        return jax.lax.scan(lambda x, w: (inner(x, w) @ w, None), x, ws)[0] @ ws[0]

    assert traced_flops(outer, struct(3, 5), struct(7, 5, 5)) == (7 * (4 + 1) + 1) * product


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
def test_traced_flops_include_calls(wrap):
    def function(x, w):
        return wrap(lambda x: jax.jit(jnp.matmul)(x, w))(x) @ w

    assert traced_flops(function, struct(3, 5), struct(5, 5)) == 2 * (2 * 3 * 5 * 5)


def test_traced_flops_include_functions_with_custom_derivatives():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy @ kept[1])
    )
    assert traced_flops(product, struct(3, 5), struct(5, 5)) == 2 * 3 * 5 * 5

    def gradients(x, w):
        return jax.grad(lambda x, w: product(x, w).sum(), argnums=(0, 1))(x, w)

    # Forward, dx, and the two products of the custom dw.
    count = 2 * 3 * 5 * 5 + 2 * 3 * 5 * 5 + 2 * 5 * 3 * 5 + 2 * 5 * 5 * 5
    assert traced_flops(gradients, struct(3, 5), struct(5, 5)) == count


def test_traced_flops_of_backward_are_twice_forward_plus_recomputation():
    def loss(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    forward = 2 * (2 * 3 * 5 * 5)
    arguments = struct(3, 5), struct(5, 5)
    assert traced_flops(loss, *arguments) == forward
    assert traced_flops(jax.grad(loss, argnums=(0, 1)), *arguments) == 3 * forward
    again = jax.grad(jax.checkpoint(loss), argnums=(0, 1))
    # Both products are recomputed, because the gradient of a tanh needs its result.
    assert traced_flops(again, *arguments) == 4 * forward


def region(x, w):
    return declare_flops(REGION, lambda x, w: {"y": x @ w, "sum": x.sum()}, x, w)["y"]


jitted = jax.jit(region)


def scanned(x, w):
    return jax.lax.scan(lambda x, _: (region(x, w), None), x, None, length=4)[0]


WRAPPED = {
    "alone": (region, 1),
    "jit": (jitted, 1),
    "checkpoint": (jax.checkpoint(region), 1),
    "scan": (scanned, 4),
    "nested": (lambda x, w: declare_flops(REGION, scanned, x, w), 1),
    "vmap": (jax.vmap(region, (0, None)), 3),
    "vmap of weights": (lambda x, w: jax.vmap(region, (None, 1))(x, w[..., None]), 5),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_region_counts_as_it_declares_each_time_it_runs(name):
    function, times = WRAPPED[name]
    arguments = struct(3, 5), struct(5, 5)
    assert model_flops(lambda x, w: function(x, w) * (x @ w).sum(), *arguments) == (
        times * REGION + PRODUCT
    )


@pytest.mark.parametrize("name", WRAPPED)
def test_counting_leaves_no_mark_on_other_traces(name):
    """In particular, jax does not remember what it traced while FLOPs were counted."""
    function, times = WRAPPED[name]
    arguments = struct(3, 5), struct(5, 5)
    for _ in range(2):
        jaxpr = str(jax.make_jaxpr(function)(*arguments))
        assert "declared_flops" not in jaxpr and "dot_general" in jaxpr
        assert model_flops(function, *arguments) == times * REGION
    x = np.ones((3, 5), np.float32)
    w = np.ones((5, 5), np.float32)
    np.testing.assert_array_equal(jitted(x, w), x @ w)


def test_convolutions_count_two_flops_per_multiply_add():
    def convolve(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "VALID", dimension_numbers=dims, feature_group_count=2
        )

    # 3 × 3 outputs of 8 features, each of a 2 × 2 patch of half of the 4 channels.
    expected = 2 * (5 * 3 * 3 * 8) * (2 * 2 * 2)
    assert traced_flops(convolve, struct(5, 6, 6, 4), struct(2, 2, 2, 8)) == expected


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_declares_the_products_that_are_not_masked(is_causal, window):
    def run(q, k, v):
        return attend(q, k, v, is_causal=is_causal, window=window)

    shapes = struct(2, 16, 4, 6), struct(2, 16, 2, 6), struct(2, 16, 2, 10)
    expected = attention_flops(16, 4, 6, is_causal=is_causal, window=window, value_dim=10)
    assert model_flops(run, *shapes) == 2 * 16 * expected
