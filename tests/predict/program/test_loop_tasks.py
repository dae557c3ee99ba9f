"""Tests of the tasks of a loop, on programs compiled for 8 simulated devices."""

import jax
import jax.numpy as jnp
import pytest

from tests.predict.mapped import compile_mapped
from tests.predict.program.loop_tasks import tasks_of_loop


def test_tasks_of_loop_list_their_dependencies(mesh):
    def function(x):
        def tick(carry, _):
            x, arrived = carry
            y = jnp.tanh(x @ x.T @ x)
            sent = jax.lax.ppermute(y, "pipeline", [(0, 1)])
            beside = jnp.sin(arrived @ arrived.T @ arrived)
            behind = jax.lax.ppermute(sent @ sent.T @ x, "pipeline", [(1, 0)])
            return (behind, beside + sent), None

        return jax.lax.scan(tick, (x, x), length=4)[0][1]

    tasks = {t.name: t for t in tasks_of_loop(compile_mapped(function, mesh), mesh)}
    sends = [task for task in tasks.values() if task.pairs]
    forward, back = sorted(sends, key=lambda task: len(task.needs))
    assert forward.pairs == tuple((i, i + 4) for i in range(4))
    assert back.pairs == tuple((i + 4, i) for i in range(4))
    assert not any(tasks[name].pairs for name in forward.needs)
    assert forward.needs < back.needs and forward.name in back.needs
    beside = tasks.keys() - {forward.name, back.name} - back.needs
    assert beside and not any(tasks[name].needs & {forward.name, back.name} for name in beside)


def test_tasks_of_loop_rejects_a_program_without_such_a_loop(mesh):
    compiled = compile_mapped(lambda x: jax.lax.ppermute(x, "pipeline", [(0, 1)]), mesh)
    with pytest.raises(ValueError, match="0 loops .* 'pipeline', but it must be one"):
        tasks_of_loop(compiled, mesh)
