"""The parts of a `BlockVJP`, compared with `jax.vjp` of the whole block."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.block_vjp import BlockVJP
from tests.pipeline.runtime.blocks import (
    INNER,
    ROWS,
    WIDTH,
    Example,
    check,
    costs,
    draw,
    shapes,
)
from tests.pipeline.schedules.tables import properties

# Hand-made blocks: each is a case in which residuals could be classified incorrectly.


def dense(params, x, microbatch, number):
    return x + jnp.tanh(x @ params)


def shared_weight(params, x, microbatch, number):
    """A kernel that is used twice, the second time transposed."""
    return x + jnp.tanh(x @ params) @ params.T


def computed_weight(params, x, microbatch, number):
    return x @ jnp.tanh(params["w"] * params["scale"]).T


def masked(params, x, microbatch, number):
    """A causal mask built in the block, and a mask that depends on the microbatch."""
    causal = jnp.tril(jnp.ones((WIDTH, WIDTH), bool))
    seen = jax.nn.relu(microbatch) > 0
    return jnp.tanh(x @ jnp.where(causal, params, 0)) * jax.nn.gelu(microbatch) * seen


def two_keys(params, x, microbatch, number):
    """Dropout with a typed key and with a raw one."""
    typed, raw = microbatch
    x = jnp.where(jax.random.bernoulli(typed, 0.7, x.shape), x @ params, 0)
    raw = jax.random.fold_in(raw, 3)
    return jnp.where(jax.random.bernoulli(raw, 0.7, x.shape), x / 0.7, 0)


def inner_loop(params, x, microbatch, number):
    return x + jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]


def inner_loop_of_one_weight(params, x, microbatch, number):
    def body(h, scale):
        return jnp.tanh(h @ jnp.tanh(params)) * scale, None

    return jax.lax.scan(body, x, microbatch)[0] @ params


def inner_loop_that_makes_weights(params, x, microbatch, number):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ jnp.tanh(w)), None), x, params)[0]


def branches(params, x, microbatch, number):
    return jax.lax.cond(microbatch > 0, lambda: jnp.tanh(x @ params), lambda: x)


def passed_through(params, x, microbatch, number):
    read = jnp.tanh(x["memory"] @ params["cross"])
    return x | {"x": x["x"] + read @ params["out"]}


def closing_over(params, x, microbatch, number):
    return x * params["w"] * np.arange(float(WIDTH)) + params["b"]


def own_derivative(params, x, microbatch, number):
    return cubed(x * params) + cubed(microbatch)


@functools.partial(jax.custom_vjp)
def _cubed(x):
    return x**3


_cubed.defvjp(lambda x: (x**3, x), lambda x, dy: (dy * x * x * 3,))
cubed: Any = _cubed


def tree_of_x():
    return {"memory": draw(ROWS, INNER), "x": draw(ROWS, WIDTH)}


def cross_params():
    return {"cross": draw(INNER, WIDTH, seed=2), "out": draw(WIDTH, WIDTH, seed=3)}


BLOCKS: dict[str, Callable[[], Example]] = {
    "dense": lambda: Example(dense, draw(WIDTH, WIDTH), draw(ROWS, WIDTH)),
    "shared weight": lambda: Example(shared_weight, draw(WIDTH, INNER), draw(ROWS, WIDTH)),
    "computed weight": lambda: Example(
        computed_weight, {"w": draw(WIDTH, WIDTH), "scale": draw(WIDTH)}, draw(ROWS, WIDTH)
    ),
    "masked": lambda: Example(masked, draw(WIDTH, WIDTH), draw(ROWS, WIDTH), draw(WIDTH)),
    "two keys": lambda: Example(
        two_keys, draw(WIDTH, WIDTH), draw(ROWS, WIDTH), (jax.random.key(0), jax.random.PRNGKey(1))
    ),
    "inner loop": lambda: Example(inner_loop, draw(2, WIDTH, WIDTH), draw(ROWS, WIDTH)),
    "inner loop of one weight": lambda: Example(
        inner_loop_of_one_weight, draw(WIDTH, WIDTH), draw(ROWS, WIDTH), draw(2)
    ),
    "inner loop that makes weights": lambda: Example(
        inner_loop_that_makes_weights, draw(2, WIDTH, WIDTH), draw(ROWS, WIDTH)
    ),
    "branches": lambda: Example(
        branches, draw(WIDTH, WIDTH), draw(ROWS, WIDTH), jnp.ones((), jnp.int32)
    ),
    "passed through": lambda: Example(passed_through, cross_params(), tree_of_x()),
    "closing over": lambda: Example(
        closing_over, {"w": draw(WIDTH), "b": draw(WIDTH, seed=2)}, draw(ROWS, WIDTH)
    ),
    "own derivative": lambda: Example(
        own_derivative, draw(WIDTH), draw(ROWS, WIDTH), draw(WIDTH, seed=2)
    ),
    "nothing saved": lambda: Example(
        lambda p, x, microbatch, number: x + p, draw(WIDTH), draw(ROWS, WIDTH)
    ),
    "x not read": lambda: Example(
        lambda p, x, microbatch, number: p * 2.0, draw(ROWS, WIDTH), draw(ROWS, WIDTH)
    ),
    "identity": lambda: Example(lambda p, x, microbatch, number: x, draw(WIDTH), draw(ROWS, WIDTH)),
}
RANDOM = ("two keys",)
#: All outputs of a loop or a branch count as depending on x if one of them does.
TOGETHER = ("inner loop that makes weights", "branches")


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_vjp_equals_jax_vjp(name):
    with jax.enable_x64(True):
        check(BLOCKS[name]())


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in (*RANDOM, *TOGETHER)])
def test_block_vjp_saves_nothing_that_x_does_not_change(name):
    with jax.enable_x64(True):
        example = BLOCKS[name]()
        taken = example.taken_apart()
        _, saved = taken.forward(*example[1:])
        x = jax.tree.map(lambda leaf: draw(*leaf.shape, seed=7) - leaf, example.x)
        _, others = taken.forward(example.params, x, example.microbatch, example.number)
        same = [a.shape for a, b in zip(saved, others, strict=True) if np.array_equal(a, b)]
        assert not same


def test_block_vjp_saves_only_activations():
    with jax.enable_x64(True):
        rows = (ROWS, WIDTH)
        for name, kinds in {
            "shared weight": {rows, (ROWS, INNER)},
            "computed weight": {rows},
            "masked": {rows},
            "inner loop": {(2, *rows)},
            "closing over": {rows},
            "own derivative": {rows},
            "nothing saved": set(),
            "x not read": set(),
            "identity": set(),
        }.items():
            assert set(shapes(BLOCKS[name]().taken_apart().saved)) == kinds, name


def test_block_vjp_saves_dropout_masks_as_bools():
    with jax.enable_x64(True):
        saved, _ = check(BLOCKS["two keys"]())
        # x, and one mask of each dropout.
        assert sorted(a.dtype.name for a in saved) == ["bool", "bool", "float64"]


def test_halves_hand_over_the_least():
    """The kernel's gradient needs only x and the gradient of x @ w."""
    with jax.enable_x64(True):
        taken = BLOCKS["dense"]().taken_apart()
        assert shapes(taken.handed) == [(ROWS, WIDTH)]
        assert len(taken.saved_for_weights) == 1
        _, saved = taken.forward(*BLOCKS["dense"]()[1:])
        np.testing.assert_array_equal(saved[taken.saved_for_weights[0]], BLOCKS["dense"]().x)


def test_halves_of_an_unused_parameter_give_zeros():
    with jax.enable_x64(True):
        params = {"used": draw(WIDTH, WIDTH), "unused": draw(INNER)}
        check(
            Example(
                lambda p, x, microbatch, number: x + jnp.tanh(x @ p["used"]),
                params,
                draw(ROWS, WIDTH),
            )
        )


def test_halves_of_a_parameter_whose_gradient_is_dy_yield_it_in_the_first():
    with jax.enable_x64(True):
        params = {"bias": draw(ROWS, WIDTH, seed=2), "kernel": draw(WIDTH, WIDTH)}
        example = Example(
            lambda p, x, microbatch, number: x + jnp.tanh(x @ p["kernel"]) + p["bias"],
            params,
            draw(ROWS, WIDTH),
        )
        check(example)
        taken = example.taken_apart()
        dy = draw(ROWS, WIDTH, seed=1)
        _, saved = taken.forward(*example[1:])
        _, early, handed = taken.input_gradient(params, (), example.number, saved, dy)
        assert early["kernel"] is None
        np.testing.assert_array_equal(early["bias"], dy)
        # dy itself is not handed over for the bias; the gradient of x @ kernel is.
        assert shapes(handed) == [(ROWS, WIDTH)] and not np.array_equal(handed[0], dy)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_halves_run_no_matrix_product_twice(name):
    with jax.enable_x64(True):
        whole, first, second = costs(BLOCKS[name]())
        assert first + second == whole


@pytest.mark.parametrize(
    "block",
    [
        lambda p, x, microbatch, number: x[:, :-1],
        lambda p, x, microbatch, number: x.astype(jnp.float16),
        lambda p, x, microbatch, number: (x, x),
    ],
    ids=["shape", "dtype", "number"],
)
def test_a_block_that_returns_something_else_than_x_is_refused(block):
    with pytest.raises(
        ValueError, match=r"a block's output must have the type of its input, .*float32.*returns"
    ):
        BlockVJP(block, jnp.ones(3), jnp.ones((2, 3)), (), jnp.int32(0))


# Blocks of random pieces.


def pieces(w, scale, bias):
    """Return name -> (x, microbatch) -> x; `w` is [WIDTH, WIDTH], the others are [WIDTH]."""

    def norm(x):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 0.1) * scale + bias

    return {
        "dot": lambda x, microbatch: jnp.tanh(x @ w),
        "residual": lambda x, microbatch: x + jax.nn.gelu(x @ w + bias) @ w.T,
        "norm": lambda x, microbatch: norm(x),
        "checkpoint": lambda x, microbatch: jax.checkpoint(lambda x: jnp.tanh(norm(x) @ w))(x),
        "jit": lambda x, microbatch: jax.jit(lambda x: x * scale + x)(x),
        "relu": lambda x, microbatch: jax.nn.relu(x + bias),
        "microbatch": lambda x, microbatch: x * jnp.sin(microbatch["scale"]),
        "dropout": lambda x, microbatch: jnp.where(
            jax.random.bernoulli(microbatch["key"], 0.8, x.shape), x, 0
        ),
        "loop": lambda x, microbatch: jax.lax.scan(
            lambda h, s: (jnp.tanh(h @ w * s), None), x, microbatch["scale"]
        )[0],
        "softmax": lambda x, microbatch: jax.nn.softmax(x @ x.T, axis=-1) @ (x @ w),
        "custom": lambda x, microbatch: cubed(x) * 0.1,
    }


NAMES = sorted(pieces(0, 0, 0))


@pytest.mark.thorough
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5), st.booleans())
@settings(properties, max_examples=12)  # each example compiles
def test_blocks_of_random_pieces_equal_jax_vjp(names, shares_weights):
    with jax.enable_x64(True):
        count = 1 if shares_weights else len(names)
        params = [
            {"w": draw(WIDTH, WIDTH, seed=i), "scale": draw(WIDTH, seed=i), "bias": draw(WIDTH)}
            for i in range(count)
        ]

        def block(params, x, microbatch, number):
            for i, name in enumerate(names):
                x = pieces(**params[i % count])[name](x, microbatch)
            return x

        microbatch = {"scale": draw(WIDTH, seed=9), "key": jax.random.key(0)}
        example = Example(block, params, draw(ROWS, WIDTH), microbatch)
        saved, _ = check(example)
        # Neither weights nor values computed from weights alone are saved.
        assert not {(WIDTH, WIDTH), (WIDTH,)} & set(shapes(saved))
        whole, first, second = costs(example)
        assert first + second == whole
