"""Tests of the chunked loss: equal to the plain one, also with a split vocab, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.layers.basic import lookup
from models.losses import chunked_vocab_loss, cross_entropy, make_token_loss
from pipeline.runtime.gather import on_shards
from sharding.logical import axis_rules
from sharding.mesh import MeshConfig, make_mesh
from sharding.rules import make_rules
from tests.compiled_arrays import has_array
from tests.runs import squared_error

NUM_TOKENS = 50
EMBED = 8
VOCAB = 29
PADDED_VOCAB = 32
#: float64 rounds at 1e-16; the sums here have 50 × 32 terms near 1.
TOLERANCE = 1e-12


def draw():
    """Return activations, table, targets and weights."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.standard_normal((NUM_TOKENS, EMBED))),
        jnp.asarray(rng.standard_normal((PADDED_VOCAB, EMBED))),
        jnp.asarray(rng.integers(VOCAB, size=NUM_TOKENS), jnp.int32),
        jnp.asarray(rng.uniform(size=NUM_TOKENS)).at[3].set(0.0),
    )


def plain(x, table, targets, weights):
    """Return the same loss from all logits at once, over the vocab without padding."""
    log_probs = jax.nn.log_softmax(x @ table[:VOCAB].T, axis=-1)
    return -jnp.sum(weights * log_probs[jnp.arange(NUM_TOKENS), targets])


# 7 and 16 do not divide 50 tokens, so the last chunk is padded.
@pytest.mark.drawn(3)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 25, 50, 1000, None])
def test_chunked_vocab_loss_equals_plain_with_gradients(chunk_tokens):
    with jax.enable_x64(True):
        x, table, targets, weights = draw()

        def chunked(x, table):
            return 3.0 * chunked_vocab_loss(  # so that its cotangent is not 1
                x, table, targets, weights, vocab_size=VOCAB, chunk_tokens=chunk_tokens
            )

        ours, grads = jax.value_and_grad(chunked, argnums=(0, 1))(x, table)
        expected, expected_grads = jax.value_and_grad(
            lambda x, table: 3.0 * plain(x, table, targets, weights), argnums=(0, 1)
        )(x, table)
        np.testing.assert_allclose(ours, expected, rtol=TOLERANCE)
        np.testing.assert_allclose(chunked(x, table), ours, rtol=TOLERANCE)
        for found, wanted in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_chunked_vocab_loss_has_zero_gradient_at_padding_and_zero_weights():
    with jax.enable_x64(True):
        x, table, targets, weights = draw()
        x_grad, table_grad = jax.grad(
            lambda x, table: chunked_vocab_loss(x, table, targets, weights, vocab_size=VOCAB),
            argnums=(0, 1),
        )(x, table)
        assert not np.any(table_grad[VOCAB:]) and np.all(np.any(table_grad[:VOCAB], axis=1))
        assert not np.any(x_grad[3]) and np.any(x_grad[2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunked_vocab_loss_never_stores_all_logits(dtype):
    num_tokens = 4096
    vocab = 512
    embed = 16
    arrays = (
        jax.ShapeDtypeStruct((num_tokens, embed), dtype),
        jax.ShapeDtypeStruct((vocab, embed), dtype),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
    )

    def compiled(chunk_tokens):
        def loss(*a):
            return chunked_vocab_loss(*a, vocab_size=vocab, chunk_tokens=chunk_tokens)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()

    # Control: with a single chunk, all logits are held at once.
    assert has_array(compiled(num_tokens), (num_tokens, vocab), jnp.float32)
    assert not has_array(compiled(256), (257, vocab), jnp.float32)


def test_cross_entropy_of_equal_logits_is_the_log_of_the_vocab_size():
    losses = cross_entropy(jnp.zeros((3, 10)), jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(losses, np.log(10), rtol=1e-6)  # float32


def test_make_token_loss_error_names_the_invalid_path():
    assert make_token_loss("models.losses:cross_entropy") is cross_entropy
    with pytest.raises(ValueError, match="model.loss='models.losses:nothing'"):
        make_token_loss("models.losses:nothing")


#: Meshes on which a stage has 8 or 16 of the 32 rows, which `model` may split further.
SHARED_BY = {
    "pipeline=4": {"pipeline": 4},
    "pipeline=2 model=2": {"pipeline": 2, "model": 2},
}


def on_stages(function, sizes, *arrays):
    """Return value and gradients of `function(table, *others)`, with the table split over stages.

    The first result holds the value of every stage; all must be equal. The gradient of the table is
    assembled from all stages. The gradient of the next argument is stacked, `[stages, ...]`.
    """
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    rows = PartitionSpec("pipeline")

    def local(table, other, *rest):
        with axis_rules(make_rules(shares_vocab=True)):
            value, (of_table, of_other) = jax.value_and_grad(function, argnums=(0, 1))(
                table, other, *rest
            )
        return value[None], of_table, of_other[None]

    inputs = (rows, *[PartitionSpec()] * (len(arrays) - 1))
    mapped = on_shards(local, mesh, inputs, (rows, rows, rows))
    with jax.set_mesh(mesh):
        spec = PartitionSpec(("pipeline", "model"))
        table = jax.device_put(arrays[0], NamedSharding(mesh, spec))
        return jax.jit(mapped)(table, *arrays[1:])


@pytest.mark.parametrize("chunk_tokens", [7, None])
# With 29 tokens, the last part ends with padding; with 13, at least one part is only padding.
@pytest.mark.drawn(2)
@pytest.mark.parametrize("vocab", [VOCAB, 13])
@pytest.mark.parametrize("sizes", SHARED_BY.values(), ids=SHARED_BY)
def test_chunked_vocab_loss_of_a_shared_vocab_equals_the_unshared_one(sizes, vocab, chunk_tokens):
    with jax.enable_x64(True):
        x, table, targets, weights = draw()
        targets = targets % vocab

        def loss(table, x, targets, weights):
            return 3.0 * chunked_vocab_loss(  # so that its cotangent is not 1
                x, table, targets, weights, vocab_size=vocab, chunk_tokens=chunk_tokens
            )

        expected, (of_table, of_x) = jax.value_and_grad(loss, argnums=(0, 1))(
            table, x, targets, weights
        )
        values, table_grad, x_grads = on_stages(loss, sizes, table, x, targets, weights)
        assert len(values) == sizes["pipeline"]
        np.testing.assert_allclose(values, np.full(len(values), expected), rtol=TOLERANCE)
        np.testing.assert_allclose(table_grad, of_table, rtol=TOLERANCE, atol=TOLERANCE)
        assert not np.any(table_grad[vocab:])
        for x_grad in x_grads:  # every stage has the full gradient
            np.testing.assert_allclose(x_grad, of_x, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", SHARED_BY.values(), ids=SHARED_BY)
def test_cross_entropy_of_a_shared_vocab_is_stable_for_large_logits(sizes):
    """The maximum is taken over all parts, so that no part's exponentials overflow or vanish."""
    with jax.enable_x64(True):
        x, table, targets, weights = draw()
        table = table * jnp.linspace(1.0, 400.0, PADDED_VOCAB)[:, None]

        def loss(table, x, targets, weights):
            return chunked_vocab_loss(x, table, targets, weights, vocab_size=VOCAB)

        wanted = jax.value_and_grad(loss)(table, x, targets, weights)
        assert np.max(np.abs(x @ table.T)) > np.log(np.finfo(np.float64).max)
        values, table_grad, _ = on_stages(loss, sizes, table, x, targets, weights)
        np.testing.assert_allclose(values, np.full(len(values), wanted[0]), rtol=TOLERANCE)
        np.testing.assert_allclose(table_grad, wanted[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", SHARED_BY.values(), ids=SHARED_BY)
def test_chunked_vocab_loss_of_a_shared_vocab_rejects_other_losses(sizes):
    def loss(table, x, targets, weights):
        return chunked_vocab_loss(
            x, table, targets, weights, vocab_size=VOCAB, token_loss=squared_error
        )

    x, table, targets, weights = draw()
    loss(table, x, targets, weights)  # works with the whole vocab
    with pytest.raises(
        ValueError,
        match="pipeline.share_vocab=True splits the vocab, and the loss 'squared_error' needs the "
        "whole of it; set pipeline.share_vocab=False, or model.loss=cross_entropy",
    ):
        on_stages(loss, sizes, table, x, targets, weights)


@pytest.mark.parametrize("sizes", SHARED_BY.values(), ids=SHARED_BY)
def test_lookup_in_a_shared_table_equals_the_unshared_one(sizes):
    with jax.enable_x64(True):
        _, table, _, _ = draw()
        ids = jnp.asarray(np.random.default_rng(1).integers(PADDED_VOCAB, size=(6, 10)), jnp.int32)
        ids = ids.at[0, :4].set(jnp.array([0, 7, 8, 31], jnp.int32))  # first and last rows of parts
        factors = jnp.asarray(np.random.default_rng(2).standard_normal((6, 10, EMBED)))

        def total(table, factors, ids):
            return jnp.sum(lookup(table, ids) * factors)

        value, (of_table, of_factors) = jax.value_and_grad(total, argnums=(0, 1))(
            table, factors, ids
        )
        values, table_grad, rows = on_stages(total, sizes, table, factors, ids)
        np.testing.assert_allclose(values, np.full(len(values), value), rtol=TOLERANCE)
        np.testing.assert_allclose(table_grad, of_table, rtol=TOLERANCE, atol=TOLERANCE)
        # The gradients of the factors are the looked-up rows, bit for bit.
        np.testing.assert_array_equal(of_factors, np.asarray(table)[ids])
        for found in rows:
            np.testing.assert_array_equal(found, of_factors)
