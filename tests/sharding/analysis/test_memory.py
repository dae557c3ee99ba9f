"""Tests of the memory and the largest arrays of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from sharding.analysis.flops import flops
from sharding.analysis.memory import has_array, memory, widest_arrays


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


def test_has_array_ignores_what_only_a_fusion_computes():
    compiled = jax.jit(lambda x: jnp.sum(jnp.sin(x)[:, None] * x)).lower(jnp.ones(64)).compile()
    assert not has_array(compiled, (64, 64), jnp.float32)
    assert has_array(compiled, (64,), jnp.float32)


def test_memory_and_flops_per_device():
    compiled = (
        jax.jit(lambda x, w: (x @ w).T @ x, donate_argnums=1)
        .lower(jnp.ones((8, 4)), jnp.ones((4, 4)))
        .compile()
    )
    found = memory(compiled)
    assert found.argument_bytes == (8 * 4 + 4 * 4) * 4
    assert found.output_bytes == 4 * 4 * 4
    assert found.alias_bytes == 4 * 4 * 4
    assert found.temp_bytes is not None and found.temp_bytes >= 8 * 4 * 4
    assert flops(compiled) == pytest.approx(2 * 2 * 8 * 4 * 4)


def test_memory_and_flops_none_where_the_backend_is_silent():
    class Silent:
        def memory_analysis(self):
            return None

        def cost_analysis(self):
            return None

    silent: jax.stages.Compiled = Silent()  # type: ignore
    assert memory(silent).temp_bytes is None
    assert flops(silent) is None
