"""The chunked loss against the plain one, and that it never holds all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import chunked_vocab_loss, cross_entropy, make_token_loss
from sharding import audit

NUM_TOKENS, EMBED, VOCAB, PADDED_VOCAB = 50, 8, 29, 32
#: float64 rounds at 1e-16; the sums here have 50 × 32 terms near 1.
TOLERANCE = 1e-12


def draw():
    """Returns activations, table, targets and weights."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.standard_normal((NUM_TOKENS, EMBED))),
        jnp.asarray(rng.standard_normal((PADDED_VOCAB, EMBED))),
        jnp.asarray(rng.integers(VOCAB, size=NUM_TOKENS), jnp.int32),
        jnp.asarray(rng.uniform(size=NUM_TOKENS)).at[3].set(0.0),
    )


def plain(x, table, targets, weights):
    """Returns the same loss from all logits at once, without the vocab's padding."""
    log_probs = jax.nn.log_softmax(x @ table[:VOCAB].T, axis=-1)
    return -jnp.sum(weights * log_probs[jnp.arange(NUM_TOKENS), targets])


# 7 and 16 do not divide 50 tokens, so that the last chunk is padded.
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 25, 50, 1000, None])
def test_chunked_vocab_loss_equals_plain_with_gradients(chunk_tokens):
    with jax.enable_x64(True):
        x, table, targets, weights = draw()

        def chunked(x, table):
            return 3.0 * chunked_vocab_loss(  # a cotangent other than 1
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


def test_chunked_vocab_loss_gives_padding_and_weightless_tokens_no_gradient():
    with jax.enable_x64(True):
        x, table, targets, weights = draw()
        x_grad, table_grad = jax.grad(
            lambda x, table: chunked_vocab_loss(x, table, targets, weights, vocab_size=VOCAB),
            argnums=(0, 1),
        )(x, table)
        assert not np.any(table_grad[VOCAB:]) and np.all(np.any(table_grad[:VOCAB], axis=1))
        assert not np.any(x_grad[3]) and np.any(x_grad[2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunked_vocab_loss_never_holds_all_logits(dtype):
    num_tokens, vocab, embed = 4096, 512, 16
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

    # The control: in one chunk all logits are there.
    assert audit.has_array(compiled(num_tokens), (num_tokens, vocab), jnp.float32)
    assert not audit.has_array(compiled(256), (257, vocab), jnp.float32)


def test_cross_entropy_of_equal_logits_is_log_of_their_number():
    losses = cross_entropy(jnp.zeros((3, 10)), jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(losses, np.log(10), rtol=1e-6)  # float32


def test_make_token_loss_names_the_path_that_leads_nowhere():
    assert make_token_loss("models.losses:cross_entropy") is cross_entropy
    with pytest.raises(ValueError, match="model.loss='models.losses:nothing'"):
        make_token_loss("models.losses:nothing")
