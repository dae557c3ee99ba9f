"""Tests of finding the arrays of compiled steps (compiled_arrays.py)."""

import jax
import jax.numpy as jnp
import pytest

from tests.compiled_arrays import dtype_name, has_array, widest_arrays


def test_has_array_tells_whole_logits_from_chunks():
    tokens = 64
    embed = 8
    vocab = 32
    chunks = 8

    def whole(x, w):
        return jax.nn.logsumexp(x @ w, axis=-1)

    def chunked(x, w):
        return jax.lax.map(lambda x: whole(x, w), x.reshape(chunks, -1, embed))

    arguments = (jnp.ones((tokens, embed)), jnp.ones((embed, vocab)))
    compiled = {f: jax.jit(f).lower(*arguments).compile() for f in (whole, chunked)}
    assert has_array(compiled[whole], (tokens, vocab), jnp.float32)
    assert not has_array(compiled[chunked], (tokens, vocab), jnp.float32)
    # The step holds a chunk of the logits, and its argument x, which is larger.
    assert has_array(compiled[chunked], (tokens // chunks, vocab), jnp.float32)
    assert not has_array(compiled[whole], (tokens, vocab), jnp.bfloat16)
    array, _ = widest_arrays(compiled[chunked], jnp.float32)[0]
    assert array.num_elements == tokens * embed


def test_has_array_ignores_values_inside_a_fusion():
    compiled = jax.jit(lambda x: jnp.sum(jnp.sin(x)[:, None] * x)).lower(jnp.ones(64)).compile()
    assert not has_array(compiled, (64, 64), jnp.float32)
    assert has_array(compiled, (64,), jnp.float32)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "f32"),
        ("bfloat16", "bf16"),
        ("float8_e4m3fn", "f8e4m3fn"),
        ("int32", "s32"),
        ("uint8", "u8"),
        ("complex64", "c64"),
        ("bool", "pred"),
    ],
)
def test_dtype_name_is_that_of_xla(dtype, name):
    assert dtype_name(dtype) == name
