"""Tests of arrays that are split over the mesh, by the memory that functions of them take."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from sharding.mesh import MeshConfig, make_mesh
from tests.predict.memory.estimates import KIB, P, estimate_of


def test_mesh_axis_splits_one_dim_of_a_product_of_two_inputs():
    mesh = make_mesh(MeshConfig(data=4), jax.devices())
    found = estimate_of(
        lambda x, y: jnp.tanh(x[:, None] + y[None, :]),
        ((64,), P("data")),
        ((64,), P("data")),
        mesh=mesh,
    )
    assert found.device_bytes == 64 * 64 * 4 // 4 + 2 * 16 * 4


def test_arrays_count_by_their_shards():
    mesh = make_mesh(MeshConfig(model=4), jax.devices())

    def layer(x, up, down):
        return jnp.tanh(x @ up) @ down

    args = ((16, 16), ((16, 64), P(None, "model")), ((64, 16), P("model", None)))
    found = estimate_of(layer, *args, mesh=mesh)
    # All of x, a quarter of up and of down, and a quarter of the product in between.
    assert found.device_bytes == 4 * KIB
    assert found.work.flops == 2 * (2 * 16 * 16 * 64) // 4


def test_accumulated_gradients_are_split_like_their_summands():
    """The gradients' buffer is initialized with zeros, which nothing splits."""
    mesh = make_mesh(MeshConfig(model=4), jax.devices())

    def step(x, ups):
        def body(grads, i):
            return grads.at[i].add(x.T @ jnp.tanh(x @ ups[i])), None

        return jax.lax.scan(body, jnp.zeros((2, 16, 64)), jnp.arange(2))[0]

    found = estimate_of(step, (16, 16), ((2, 16, 64), P(None, None, "model")), mesh=mesh)
    # x, a quarter of parameters and of gradients, and a quarter of three arrays of one layer: its
    # parameter, its activations and its gradient; then two counters.
    assert found.device_bytes <= 1 * KIB + 2 * 2 * KIB + 3 * KIB + 64


def test_saved_sums_are_split_like_the_constraint_that_they_get_later():
    """A loop saves the output of a product, and constrains it only then."""
    mesh = make_mesh(MeshConfig(model=4), jax.devices())
    split = NamedSharding(mesh, P("model"))

    def saved(x, downs):
        def body(saved, i):
            sums = x @ downs[i]
            saved = jax.lax.dynamic_update_index_in_dim(saved, sums, i, 0)
            return saved, jax.lax.with_sharding_constraint(sums, split).sum()

        return jax.lax.scan(body, jnp.zeros((8, 32, 16)), jnp.arange(8))

    args = (((32, 64), P(None, "model")), ((8, 64, 16), P(None, "model", None)))
    found = estimate_of(saved, *args, mesh=mesh)
    # A quarter of x, of the kernels and of the saved sums, then one whole sum; and small arrays.
    assert found.device_bytes <= 2 * KIB + 8 * KIB + 4 * KIB + 2 * KIB + 2 * KIB


def test_gradients_of_an_embedding_are_split_like_its_parameters():
    mesh = make_mesh(MeshConfig(model=4), jax.devices())

    def update(table, x, ids):
        gradients = jnp.zeros((64, 16)).at[ids.astype(jnp.int32)].add(x)
        return table - gradients

    found = estimate_of(update, ((64, 16), P("model")), (16, 16), (16,), mesh=mesh)
    # A quarter of the table, which is updated in place, and of its gradients; then x and ids.
    assert found.device_bytes <= KIB + KIB + KIB + 2 * 64
