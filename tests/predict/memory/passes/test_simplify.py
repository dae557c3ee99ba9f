"""Tests of XLA's simplifications, by the work and the memory that they save."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.predict.memory.estimates import KIB, estimate_of


def test_recomputation_saves_nothing_unless_a_loop_separates_it_from_the_forward():
    """XLA's GPU compiler merges equal computations on equal values."""
    block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w.T), prevent_cse=False)

    def loss(x, ws):
        def body(x, w):
            return (block(x, w), None)

        return jnp.sum(jnp.sin(jax.lax.scan(body, x, ws)[0]))

    def num_products(num_layers, platform, argnums=(0, 1)):
        args = (16, 16), (num_layers, 16, 64)
        work = estimate_of(jax.grad(loss, argnums=argnums), *args, platform=platform).work
        return work.flops / (2 * 16 * 16 * 64) / num_layers

    # Two products forward, the same two recomputed, and four backward.
    assert num_products(8, "gpu") == num_products(8, "cpu") == num_products(1, "cpu") == 2 + 2 + 4
    assert num_products(1, "gpu") == 2 + 4
    # Nothing reads the gradient of x, and no loop has to carry it.
    assert num_products(1, "gpu", argnums=1) == 2 + 3


def test_estimate_of_repeated_work_counts_it_once():
    def twice(x, w):
        return jnp.tanh(x @ w) + jnp.tanh(x @ w)

    assert estimate_of(twice, (16, 16), (16, 16)).work.flops == 2 * 16**3
    assert estimate_of(twice, (16, 16), (16, 16), platform="cpu").work.flops == 4 * 16**3


def test_operations_on_equal_constants_are_merged():
    """Two arrays with equal elements, and a number written as an integer and as a float."""

    def products(x, *zeros):
        def product(zero):
            constant = jnp.asarray(np.arange(16 * 16, dtype=np.float32).reshape(16, 16))
            return jnp.sum((x * jnp.where(constant > 3, constant, zero)) @ x)

        return sum(map(product, zeros))

    def num_products(*zeros):
        work = estimate_of(lambda x: products(x, *zeros), (16, 16)).work
        return work.flops / (2 * 16**3)

    assert num_products(0, 0.0) == num_products(1.0, 1.0) == 1
    assert num_products(0, 1.0) == 2


def test_write_of_a_whole_buffer_allocates_nothing():
    def through(x, w):
        y = x @ w
        buffer = jax.lax.dynamic_update_slice(jnp.zeros((1, 16, 16)), y[None], (0, 0, 0))
        return jnp.sum(jax.lax.dynamic_slice(buffer, (0, 0, 0), (1, 16, 16))) + y

    assert estimate_of(through, (16, 16), (16, 16)).device_bytes <= 3 * KIB + 4
