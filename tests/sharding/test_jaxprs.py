"""Tests of walks through traced functions."""

import collections

import jax
import jax.numpy as jnp
import pytest

from sharding.jaxprs import dot_general_flops, inner_jaxprs, walk

X = jax.ShapeDtypeStruct((3, 3), jnp.float32)


def executions(function, *args) -> collections.Counter:
    """Return name of the primitive -> number of executions."""
    found = collections.Counter()
    for eqn, times in walk(jax.make_jaxpr(function)(*args).eqns):
        found[eqn.primitive.name] += times
    return found


def test_walk_counts_the_iterations_of_nested_scans():
    def function(x):
        def inner(x, _):
            return jnp.tanh(x), None

        def outer(x, _):
            return jnp.sin(jax.lax.scan(inner, x, length=3)[0]), None

        return jnp.cos(jax.lax.scan(outer, x, length=5)[0])

    found = executions(function, X)
    assert (found["tanh"], found["sin"], found["cos"]) == (15, 5, 1)
    assert found["scan"] == 1 + 5


def test_walk_takes_every_branch_and_the_body_of_a_while_loop_once():
    def function(x):
        x = jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jnp.cos(jnp.cos(x)), x)
        return jax.lax.while_loop(lambda x: jnp.any(x < 9), jnp.exp, x)

    found = executions(function, X)
    assert (found["sin"], found["cos"], found["exp"]) == (1, 2, 1)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.custom_jvp, jax.custom_vjp])
def test_walk_looks_into_calls(wrap):
    inner = wrap(jnp.tanh)
    if hasattr(inner, "defvjp"):
        inner.defvjp(lambda x: (jnp.tanh(x), x), lambda x, dy: (dy,))
    if hasattr(inner, "defjvp"):
        inner.defjvp(lambda xs, dxs: (jnp.tanh(*xs), *dxs))
    assert executions(lambda x: inner(x), X)["tanh"] == 1


def test_walk_yields_an_equation_before_those_that_it_contains():
    eqns = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x))(X).eqns
    names = [eqn.primitive.name for eqn, _ in walk(eqns)]
    assert names.index("scan") < names.index("sin")
    assert [eqn for eqn, times in walk(eqns[-1:], 2)][0] is eqns[-1]
    assert {times for _, times in walk(eqns[-1:], 2)} == {2, 2 * 3}


def test_inner_jaxprs_of_a_conditional_are_its_branches():
    eqns = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x))(X).eqns
    inner = {eqn.primitive.name: inner_jaxprs(eqn) for eqn in eqns}
    assert [jaxpr.eqns[0].primitive.name for jaxpr in inner["cond"]] == ["cos", "sin"]
    assert inner["gt"] == []


@pytest.mark.parametrize(
    ("spec", "left", "right", "flops"),
    [
        ("mk,kn->mn", (8, 5), (5, 3), 2 * 8 * 5 * 3),
        ("bmk,bkn->bmn", (4, 8, 5), (4, 5, 3), 2 * 4 * 8 * 5 * 3),
        ("mkl,lkn->mn", (8, 5, 7), (7, 5, 3), 2 * 8 * 5 * 7 * 3),
        ("m,n->mn", (8,), (3,), 2 * 8 * 3),
    ],
)
def test_dot_general_flops_are_two_per_multiplication(spec, left, right, flops):
    shapes = (jnp.zeros(left), jnp.zeros(right))
    eqns = jax.make_jaxpr(lambda a, b: jnp.einsum(spec, a, b))(*shapes).eqns
    (eqn,) = (eqn for eqn, _ in walk(eqns) if eqn.primitive.name == "dot_general")
    found = dot_general_flops(eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    assert found == flops
