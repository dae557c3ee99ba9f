"""Tests of the memory of compiled programs."""

import jax
import jax.numpy as jnp

from predict.program.memory import memory


def test_memory_per_device():
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


def test_memory_is_none_if_the_backend_reports_nothing():
    class Silent:
        def memory_analysis(self):
            return None

    silent: jax.stages.Compiled = Silent()  # type: ignore
    assert memory(silent).temp_bytes is None
