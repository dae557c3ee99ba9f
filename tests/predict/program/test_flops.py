"""Tests of the FLOPs of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from predict.program.flops import matmul_flops
from tests.predict.mapped import COLUMNS, ROWS, X


def flops_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return matmul_flops(jax.jit(function).lower(*arguments).compile())


@pytest.mark.parametrize(
    "spec, shapes, flops",
    [
        ("mk,kn->mn", ((8, 5), (5, 3)), 2 * 8 * 5 * 3),
        ("bmk,bkn->bmn", ((4, 8, 5), (4, 5, 3)), 2 * 4 * 8 * 5 * 3),
        ("bkm,nkb->bnm", ((4, 5, 8), (3, 5, 4)), 2 * 4 * 8 * 5 * 3),
        ("mkl,lkn->mn", ((8, 5, 7), (7, 5, 3)), 2 * 8 * 5 * 7 * 3),
    ],
)
def test_matmul_flops_are_two_per_multiplication(spec, shapes, flops):
    assert flops_of(lambda a, b: jnp.einsum(spec, a, b), *shapes) == flops


def test_matmul_flops_count_loops_as_often_as_they_run():
    def function(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            x = jax.lax.scan(inner, x, length=3)[0]
            return jnp.sin(x.T @ x @ w) + x[:1], None

        return jax.lax.scan(outer, x, length=5)[0] @ w

    step = 2 * 16 * 16 * 16
    assert flops_of(function, (16, 16), (16, 16)) == (5 * 3 + 5 * 2 + 1) * step


def test_matmul_flops_take_every_branch():
    def function(runs, x, w):
        return jax.lax.cond(runs.sum() > 0, lambda: x @ w, lambda: jnp.sin(x))

    assert flops_of(function, (1,), (8, 8), (8, 8)) == 2 * 8 * 8 * 8


def test_matmul_flops_are_unknown_in_an_open_ended_loop():
    def function(x):
        return jax.lax.while_loop(lambda x: jnp.all(x < 9), lambda x: x @ x, x)

    assert flops_of(function, (8, 8)) is None
    assert flops_of(lambda x: jax.lax.while_loop(jnp.all, jnp.sin, x) @ x, (8, 8)) == 2 * 8**3


def test_matmul_flops_are_per_device(mesh):
    def split(*spec):
        return NamedSharding(mesh, P(*spec))

    step = jax.jit(
        lambda x, w: x @ w,
        in_shardings=(split("data", "model"), split("model", None)),
        out_shardings=split("data", None),
    )
    compiled = step.lower(X, jax.ShapeDtypeStruct((COLUMNS, 8), jnp.float32)).compile()
    assert matmul_flops(compiled) == 2 * (ROWS // 2) * (COLUMNS // 2) * 8


def convolve(x, w, **options):
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "image, kernel, options, flops",
    [
        # Patches: every pixel is multiplied with every filter once.
        ((2, 8, 8, 3), (4, 4, 3, 5), dict(window_strides=(4, 4), padding="VALID"), 2 * 384 * 5),
        # With a padding of 1, the 4 outputs of a row read 2 + 3 + 3 + 2 pixels. A group reads only
        # its own channels.
        (
            (1, 4, 1, 4),
            (3, 1, 2, 6),
            dict(window_strides=(1, 1), padding=((1, 1), (0, 0)), feature_group_count=2),
            2 * (2 + 3 + 3 + 2) * 2 * 6,
        ),
    ],
)
def test_matmul_flops_of_convolutions_leave_padding_out(image, kernel, options, flops):
    def forward(x, w):
        return convolve(x, w, **options)

    assert flops_of(forward, image, kernel) == flops
    # Each of the two gradients multiplies the same pairs again.
    for argument in (0, 1):
        gradient = jax.grad(lambda x, w: jnp.sum(forward(x, w) ** 2), argument)
        assert flops_of(gradient, image, kernel) == 2 * flops
