"""Shared by tests of `BlockVJP`: a block with its arguments, and a comparison with `jax.vjp`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.layers.flops import traced_flops
from pipeline.runtime.block_vjp import BlockVJP

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
    microbatch: Any = ()
    number: Any = np.int32(0)

    def taken_apart(self) -> BlockVJP:
        return BlockVJP(*self)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


def shapes(leaves) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in leaves]


def check(example: Example) -> tuple[list[jax.Array], list[jax.Array]]:
    """Compare all parts with jax.vjp, and return the saved and the handed-over arrays."""
    block, params, x, microbatch, number = example
    taken = example.taken_apart()
    dy = jax.tree.map(lambda leaf: draw(*leaf.shape, seed=1), x)

    # A low optimization level, because compilation dominates the time of these tests.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, x, microbatch, number, dy):
        y, vjp = jax.vjp(lambda params, x: block(params, x, microbatch, number), params, x)
        wanted = y, *vjp(dy)
        y, saved = taken.forward(params, x, microbatch, number)
        whole = y, *taken.backward(params, microbatch, number, saved, dy)
        dx, early, handed = taken.input_gradient(params, microbatch, number, saved, dy)
        kept = [saved[i] for i in taken.saved_for_weights]
        late = taken.weight_gradient(params, microbatch, number, kept, handed)
        return wanted, whole, (dx, early, late), saved, handed

    wanted, whole, (dx, early, late), saved, handed = run(params, x, microbatch, number, dy)

    def close(found, expected):
        # The same operations, possibly fused or summed in another order. The tolerance allows for
        # rounding (1e-16) of sums of up to a few hundred terms.
        atol = 1e-13 * max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)

    jax.tree.map(close, whole, wanted)
    jax.tree.map(close, dx, wanted[2])
    # Each gradient is computed by exactly one of the halves.
    gradients, structure = jax.tree.flatten(wanted[1])
    halves = [structure.flatten_up_to(half) for half in (early, late)]
    for expected, *found in zip(gradients, *halves, strict=True):
        (gradient,) = (each for each in found if each is not None)
        close(gradient, expected)
    # Shapes and dtypes are as announced.
    announced = [(s.shape, s.dtype) for s in (*taken.saved, *taken.handed)]
    assert [(a.shape, a.dtype) for a in (*saved, *handed)] == announced
    return saved, handed


def costs(example: Example) -> tuple[int, int, int]:
    """Return the FLOPs of a whole backward, and of its two halves."""
    taken = example.taken_apart()
    (_, params, x, microbatch, number) = example
    kept = [taken.saved[i] for i in taken.saved_for_weights]
    return (
        traced_flops(taken.backward, params, microbatch, number, taken.saved, x),
        traced_flops(taken.input_gradient, params, microbatch, number, taken.saved, x),
        traced_flops(taken.weight_gradient, params, microbatch, number, kept, taken.handed),
    )
