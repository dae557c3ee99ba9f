"""The parts of a `BlockVJP`, compared with `jax.vjp` of the whole block."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from models.flops import traced_flops
from models.stack import partition
from models.text.gpt2 import GPT2, GPT2Config
from sharding.pipeline.runtime.block_vjp import BlockVJP
from tests.runs import ROOT
from tests.sharding.pipeline.schedules.tables import properties

#: Sizes are all different, so a shape identifies its array.
ROWS = 3
WIDTH = 5
INNER = 4
B = 2
T = 24
D = 16
N = 4


class Example(NamedTuple):
    """A block and its arguments."""

    block: Callable
    params: Any
    x: Any
    side: Any = ()

    def taken_apart(self) -> BlockVJP:
        return BlockVJP(*self)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


def shapes(leaves) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in leaves]


def check(example: Example) -> tuple[list[jax.Array], list[jax.Array]]:
    """Compare all parts with jax.vjp, and return the saved and the handed-over arrays."""
    block, params, x, side = example
    taken = example.taken_apart()
    dy = jax.tree.map(lambda leaf: draw(*leaf.shape, seed=1), x)

    # A low optimization level, because compilation dominates the time of these tests.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, x, side, dy):
        y, vjp = jax.vjp(lambda params, x: block(params, x, side), params, x)
        wanted = y, *vjp(dy)
        y, saved = taken.forward(params, x, side)
        whole = y, *taken.backward(params, side, saved, dy)
        dx, early, handed = taken.input_gradient(params, side, saved, dy)
        kept = [saved[i] for i in taken.saved_for_weights]
        late = taken.weight_gradient(params, side, kept, handed)
        return wanted, whole, (dx, early, late), saved, handed

    wanted, whole, (dx, early, late), saved, handed = run(params, x, side, dy)

    def close(found, expected):
        # The same operations, possibly fused or summed in another order. The tolerance allows for
        # rounding (1e-16) of sums of up to a few hundred terms.
        atol = 1e-13 * max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)

    jax.tree.map(close, whole, wanted)
    jax.tree.map(close, dx, wanted[2])
    # Each gradient is computed by exactly one of the halves.
    assert [e is None for e in early] == [w is not None for w in late]
    halves = [w if e is None else e for e, w in zip(early, late, strict=True)]
    jax.tree.map(close, halves, jax.tree.leaves(wanted[1]))
    # Shapes and dtypes are as announced.
    announced = [(s.shape, s.dtype) for s in (*taken.saved, *taken.handed)]
    assert [(a.shape, a.dtype) for a in (*saved, *handed)] == announced
    return saved, handed


def costs(example: Example) -> tuple[int, int, int]:
    """Return the FLOPs of a whole backward, and of its two halves."""
    taken = example.taken_apart()
    (_, params, x, side) = example
    kept = [taken.saved[i] for i in taken.saved_for_weights]
    return (
        traced_flops(taken.backward, params, side, taken.saved, x),
        traced_flops(taken.input_gradient, params, side, taken.saved, x),
        traced_flops(taken.weight_gradient, params, side, kept, taken.handed),
    )


# Hand-made blocks: each is a case in which residuals could be classified incorrectly.


def dense(params, x, side):
    return x + jnp.tanh(x @ params)


def shared_weight(params, x, side):
    """A kernel that is used twice, the second time transposed."""
    return x + jnp.tanh(x @ params) @ params.T


def computed_weight(params, x, side):
    return x @ jnp.tanh(params["w"] * params["scale"]).T


def masked(params, x, side):
    """A causal mask built in the block, and a mask that depends on the side input."""
    causal = jnp.tril(jnp.ones((WIDTH, WIDTH), bool))
    seen = jax.nn.relu(side) > 0
    return jnp.tanh(x @ jnp.where(causal, params, 0)) * jax.nn.gelu(side) * seen


def two_keys(params, x, side):
    """Dropout with a typed key and with a raw one."""
    typed, raw = side
    x = jnp.where(jax.random.bernoulli(typed, 0.7, x.shape), x @ params, 0)
    raw = jax.random.fold_in(raw, 3)
    return jnp.where(jax.random.bernoulli(raw, 0.7, x.shape), x / 0.7, 0)


def inner_loop(params, x, side):
    return x + jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]


def inner_loop_of_one_weight(params, x, side):
    def body(h, scale):
        return jnp.tanh(h @ jnp.tanh(params)) * scale, None

    return jax.lax.scan(body, x, side)[0] @ params


def inner_loop_that_makes_weights(params, x, side):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ jnp.tanh(w)), None), x, params)[0]


def branches(params, x, side):
    return jax.lax.cond(side > 0, lambda: jnp.tanh(x @ params), lambda: x)


def passed_through(params, x, side):
    read = jnp.tanh(x["memory"] @ params["cross"])
    return x | {"x": x["x"] + read @ params["out"]}


def closing_over(params, x, side):
    return x * params["w"] * np.arange(float(WIDTH)) + params["b"]


def own_derivative(params, x, side):
    return cubed(x * params) + cubed(side)


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
    "nothing saved": lambda: Example(lambda p, x, side: x + p, draw(WIDTH), draw(ROWS, WIDTH)),
    "x not read": lambda: Example(lambda p, x, side: p * 2.0, draw(ROWS, WIDTH), draw(ROWS, WIDTH)),
    "identity": lambda: Example(lambda p, x, side: x, draw(WIDTH), draw(ROWS, WIDTH)),
}
RANDOM = ("two keys",)
#: All outputs of a loop or a branch count as depending on x if one of them does.
TOGETHER = ("inner loop that makes weights", "branches")


@pytest.mark.parametrize("name", BLOCKS)
def test_block_vjp_equals_jax_vjp(name):
    with jax.enable_x64(True):
        check(BLOCKS[name]())


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in (*RANDOM, *TOGETHER)])
def test_block_vjp_saves_nothing_that_x_does_not_change(name):
    with jax.enable_x64(True):
        example = BLOCKS[name]()
        taken = example.taken_apart()
        _, saved = taken.forward(*example[1:])
        x = jax.tree.map(lambda leaf: draw(*leaf.shape, seed=7) - leaf, example.x)
        _, others = taken.forward(example.params, x, example.side)
        same = [a.shape for a, b in zip(saved, others, strict=True) if np.array_equal(a, b)]
        assert not same


def test_block_vjp_saves_activations_alone():
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
        check(Example(lambda p, x, side: x + jnp.tanh(x @ p["used"]), params, draw(ROWS, WIDTH)))


def test_halves_of_a_parameter_whose_gradient_is_dy_yield_it_in_the_first():
    with jax.enable_x64(True):
        params = {"bias": draw(ROWS, WIDTH, seed=2), "kernel": draw(WIDTH, WIDTH)}
        example = Example(
            lambda p, x, side: x + jnp.tanh(x @ p["kernel"]) + p["bias"],
            params,
            draw(ROWS, WIDTH),
        )
        check(example)
        taken = example.taken_apart()
        dy = draw(ROWS, WIDTH, seed=1)
        _, saved = taken.forward(*example[1:])
        _, early, handed = taken.input_gradient(params, (), saved, dy)
        assert early[1] is None
        np.testing.assert_array_equal(early[0], dy)
        # dy itself is not handed over for the bias; the gradient of x @ kernel is.
        assert shapes(handed) == [(ROWS, WIDTH)] and not np.array_equal(handed[0], dy)


@pytest.mark.parametrize("name", BLOCKS)
def test_halves_run_no_matrix_product_twice(name):
    with jax.enable_x64(True):
        whole, first, second = costs(BLOCKS[name]())
        assert first + second == whole


@pytest.mark.parametrize(
    "block",
    [
        lambda p, x, side: x[:, :-1],
        lambda p, x, side: x.astype(jnp.float16),
        lambda p, x, side: (x, x),
    ],
    ids=["shape", "dtype", "number"],
)
def test_a_block_that_returns_something_else_than_x_is_refused(block):
    with pytest.raises(
        ValueError, match=r"a block's output must have the type of its input, .*float32.*returns"
    ):
        BlockVJP(block, jnp.ones(3), jnp.ones((2, 3)), ())


# Blocks of random pieces.


def pieces(w, scale, bias):
    """Return name -> (x, side) -> x; `w` is [WIDTH, WIDTH], `scale` and `bias` are [WIDTH]."""

    def norm(x):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 0.1) * scale + bias

    return {
        "dot": lambda x, side: jnp.tanh(x @ w),
        "residual": lambda x, side: x + jax.nn.gelu(x @ w + bias) @ w.T,
        "norm": lambda x, side: norm(x),
        "checkpoint": lambda x, side: jax.checkpoint(lambda x: jnp.tanh(norm(x) @ w))(x),
        "jit": lambda x, side: jax.jit(lambda x: x * scale + x)(x),
        "relu": lambda x, side: jax.nn.relu(x + bias),
        "side": lambda x, side: x * jnp.sin(side["scale"]),
        "dropout": lambda x, side: jnp.where(jax.random.bernoulli(side["key"], 0.8, x.shape), x, 0),
        "loop": lambda x, side: jax.lax.scan(
            lambda h, s: (jnp.tanh(h @ w * s), None), x, side["scale"]
        )[0],
        "softmax": lambda x, side: jax.nn.softmax(x @ x.T, axis=-1) @ (x @ w),
        "custom": lambda x, side: cubed(x) * 0.1,
    }


NAMES = sorted(pieces(0, 0, 0))


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5), st.booleans())
@settings(properties, max_examples=12)  # each example compiles
def test_blocks_of_random_pieces_equal_jax_vjp(names, shares_weights):
    with jax.enable_x64(True):
        count = 1 if shares_weights else len(names)
        params = [
            {"w": draw(WIDTH, WIDTH, seed=i), "scale": draw(WIDTH, seed=i), "bias": draw(WIDTH)}
            for i in range(count)
        ]

        def block(params, x, side):
            for i, name in enumerate(names):
                x = pieces(**params[i % count])[name](x, side)
            return x

        side = {"scale": draw(WIDTH, seed=9), "key": jax.random.key(0)}
        example = Example(block, params, draw(ROWS, WIDTH), side)
        saved, _ = check(example)
        # Neither weights nor values computed from weights alone are saved.
        assert not {(WIDTH, WIDTH), (WIDTH,)} & set(shapes(saved))
        whole, first, second = costs(example)
        assert first + second == whole


# GPT-2's own block.


@functools.cache
def gpt2_block(remat: str, *, uses_dropout: bool, length: int = T) -> Example:
    config = GPT2Config(
        vocab_size=40, max_positions=length, num_layers=2, num_heads=N, embed_dim=D, dropout=0.2
    )
    model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
    parts = partition(model, remat=remat)
    layers = parts.split(nnx.to_pure_dict(nnx.split(model)[1]))["layers"]["decoder"]
    # Not the initial values: zero biases and small kernels would hide wrong gradients.
    params = jax.tree.map(lambda p: 0.3 * draw(*p.shape[1:]), layers)
    batch = {"weights": draw(B, length)}
    if uses_dropout:
        batch["dropout_keys"] = jax.random.split(jax.random.key(0), B)
    block = parts.blocks["decoder"]
    return Example(
        lambda p, x, side: block(p, x, *side), params, draw(B, length, D), (batch, jnp.int32(1))
    )


@pytest.mark.parametrize("uses_dropout", [False, True])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gpt2_block_equals_jax_vjp_and_saves_activations_alone(remat, uses_dropout):
    with jax.enable_x64(True):
        example = gpt2_block(remat, uses_dropout=uses_dropout)
        saved, handed = check(example)
        # Every array has a batch and a sequence dim; weights and causal masks have not.
        for array in (*saved, *handed):
            # Keys and values have a row per head, queries a row per head and group.
            rows = B * T
            head_rows = ((B, N, T), (B, N, 1, T))
            assert (
                array.shape[:2] == (B, T)
                or array.shape[:3] in head_rows
                or array.shape[:4] in head_rows
                or (array.shape[0] == rows)
            ), array.shape
        # Random bits are saved only as masks; recomputed parts draw them again.
        masks = 2 if uses_dropout and remat == "none" else 0
        assert [a.dtype.name for a in saved].count("bool") == masks
        assert {a.dtype.name for a in (*saved, *handed)} <= {"bool", "float64"}
        if remat == "full":
            assert len(saved) == 1
            np.testing.assert_array_equal(saved[0], example.x)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gpt2_block_runs_no_matrix_product_twice(remat):
    with jax.enable_x64(True):
        example = gpt2_block(remat, uses_dropout=True)
        whole, first, second = costs(example)
        assert first + second == whole
        kernels = D * 3 * D + D * D + 2 * D * 4 * D  # qkv, out, up and down
        # The second half consists of all matrix products for the kernels' gradients.
        assert second == 2 * B * T * kernels


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gpt2_block_keeps_nothing_quadratic_in_the_sequence(remat):
    with jax.enable_x64(True):
        long = 256  # two blocks of queries; longer than any other dim
        taken = gpt2_block(remat, uses_dropout=True, length=long).taken_apart()
        for shape in shapes([*taken.saved, *taken.handed]):
            assert math.prod(shape) <= B * long * 4 * D, shape
        # Control: the block does have intermediate products of quadratic size.
        quadratic = B * N * long * long
        assert quadratic > B * long * 4 * D


_SCRIPT = """
import hashlib
import jax
from tests.sharding.pipeline.runtime.test_block_vjp import gpt2_block
with jax.enable_x64(True):
    example = gpt2_block("none", uses_dropout=True)
    taken = example.taken_apart()
    kept = [taken.saved[i] for i in taken.saved_for_weights]
    args = example.params, example.side, taken.saved, example.x
    late = example.params, example.side, kept, taken.handed
    print([(s.shape, s.dtype.name) for s in (*taken.saved, *taken.handed)])
    print(taken.saved_for_weights)
    for function, inputs in ((taken.input_gradient, args), (taken.weight_gradient, late)):
        program = jax.jit(function).lower(*inputs).as_text()
        print(hashlib.sha256(program.encode()).hexdigest())
"""


def test_every_process_comes_to_the_same_program():
    def run(seed: str) -> subprocess.Popen:
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _SCRIPT]
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    processes = [run("1"), run("2")]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 4
