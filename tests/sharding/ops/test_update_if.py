"""Updates that run only if a condition holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.ops.update_if import AT_MOST_ONCE, Condition, update_if


def doubled(state):
    return {"x": 2 * state["x"], "n": state["n"] + 1}


STATE = {"x": np.arange(3.0), "n": np.int32(5)}


@pytest.mark.parametrize("runs", [True, False])
def test_update_if_updates_all_of_the_state_once_or_not_at_all(runs):
    update = jax.jit(lambda p, state: update_if(Condition(lambda: p), doubled, state))
    state = update(runs, STATE)
    assert state["n"] == (6 if runs else 5)
    np.testing.assert_array_equal(state["x"], STATE["x"] * (2 if runs else 1))


@pytest.mark.parametrize("known", [True, False])
def test_a_known_predicate_is_resolved_during_tracing(known):
    def update(p, state):
        return update_if(Condition(lambda: p, known), doubled, state)

    jaxpr = jax.make_jaxpr(update)(True, STATE)
    assert {eqn.primitive.name for eqn in jaxpr.eqns} == ({"mul", "add"} if known else set())


def test_each_update_of_a_sequence_sees_the_one_before():
    def tick(state, predicate):
        state = update_if(Condition(lambda: predicate), doubled, state)
        return update_if(
            Condition(lambda: ~predicate), lambda s: {**s, "n": s["n"] * 10}, state
        ), None

    predicates = jnp.array([True, False, True])
    state, _ = jax.lax.scan(tick, STATE, predicates)
    assert state["n"] == (5 + 1) * 10 + 1
    np.testing.assert_array_equal(state["x"], STATE["x"] * 4)


def test_compiled_loop_keeps_the_name_of_its_scope():
    def update(p, x):
        return update_if(Condition(lambda: p), jnp.sin, x)

    text = jax.jit(update).lower(True, 1.0).compile().as_text()
    assert text is not None
    (loop,) = (line for line in text.splitlines() if " while(" in line)
    assert f"/{AT_MOST_ONCE}/while" in loop
