"""Walks and evaluates traced functions.

A jaxpr lists the equations of a function. Some of them contain jaxprs of their own: calls, loops
and branches. For `jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)` with 8 matrices, the
walk gives

    equation       times
    scan           1
    dot_general    8
    tanh           8

An evaluation keeps the values of variables in an *environment*, a dict, so that a caller can run
some of the equations only (`needed_equations`), or some of them at another time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from sharding.labels import expected_trips_of

#: A `JaxprEqn`. As jax declares it, the types of its variables have neither shape nor memory space.
Equation = Any
#: A variable of a jaxpr, or a `Literal`.
Variable = Any
Environment = dict[Variable, Any]

#: Primitives that only call a jaxpr, which `inlined` replaces by its equations.
_CALLS = ("jit", "remat2")


def walk(equations: Iterable[Equation], times: int = 1) -> Iterator[tuple[Equation, int]]:
    """Yield equations and, after each of them, all equations of the jaxprs that it contains.

    Args:
        equations: equations, such as `jaxpr.eqns`.
        times: how often they run.

    Yields:
        (equation, number of executions). Every iteration of a scan counts, and every branch of a
        conditional counts as if it were always taken. The body of a while loop counts as often as
        its scope says (labels.py), or else once.
    """
    for eqn in equations:
        yield eqn, times
        inner_times = times
        if eqn.primitive.name == "scan":
            inner_times *= eqn.params["length"]
        elif eqn.primitive.name == "while":
            scope = str(eqn.source_info.name_stack).rpartition("/")[2]
            expected = expected_trips_of(scope.rpartition("(")[2].rstrip(")"))
            inner_times *= 1 if expected is None else int(expected)
        for jaxpr in inner_jaxprs(eqn):
            yield from walk(jaxpr.eqns, inner_times)


def inner_jaxprs(eqn: Equation) -> list[Jaxpr]:
    """Return the jaxprs that an equation contains, such as the body of a loop or the branches."""
    return list(jaxprs_in_params(eqn.params))


def dot_general_flops(params: Mapping[str, Any], left: Sequence[int], output: Sequence[int]) -> int:
    """Return the FLOPs of a `dot_general`: a multiply-add is two.

    Args:
        params: parameters of the equation.
        left: shape of its first input.
        output: shape of its output.
    """
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * math.prod(output) * math.prod(left[dim] for dim in contracted)


def convolution_flops(
    params: Mapping[str, Any], kernel: Sequence[int], output: Sequence[int]
) -> int:
    """Return the FLOPs of a `conv_general_dilated`, with its padding.

    Args:
        params: parameters of the equation.
        kernel: shape of its second input.
        output: shape of its output.
    """
    out_dim = params["dimension_numbers"].rhs_spec[0]
    return 2 * math.prod(output) * math.prod(kernel) // kernel[out_dim]


def trace_inlined(function: Callable, *args: Any) -> ClosedJaxpr:
    """Trace `function` to a closed jaxpr with all calls inlined."""
    traced = jax.make_jaxpr(function)(*args)
    return jax.make_jaxpr(lambda *leaves: _evaluate_inlined(traced, leaves))(*jax.tree.leaves(args))


def _evaluate_inlined(closed: ClosedJaxpr, args: Sequence) -> list:
    """Return the outputs of a closed jaxpr, with the equations of calls evaluated one by one."""
    jaxpr = closed.jaxpr
    env = environment(closed, args)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            inner = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
            values = _evaluate_inlined(inner, [value_of(v, env) for v in eqn.invars])
            env.update(zip(eqn.outvars, values, strict=True))
        else:
            evaluate([eqn], env)
    return [value_of(v, env) for v in jaxpr.outvars]


def reads(function: Callable, params: Any, *args: Any) -> Any:
    """Return a bool per leaf of `params`: whether a result of the function depends on it.

    Args:
        function: `(params, *args) -> results`.
        params: tree of arrays or ShapeDtypeStructs.
        *args: further arguments.
    """
    # Dead-code elimination marks the inputs that no output depends on.
    jaxpr = jax.make_jaxpr(function)(params, *args).jaxpr
    _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    structure = jax.tree.structure(params)
    return jax.tree.unflatten(structure, is_read[: structure.num_leaves])


def environment(closed: ClosedJaxpr, inputs: Sequence) -> Environment:
    """Map the inputs and constants of a closed jaxpr to their values."""
    env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    return env | dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def evaluate(equations: Sequence[Equation], env: Environment) -> None:
    """Evaluate equations, reading variables from `env` and writing them to it."""
    for eqn in equations:
        inputs = [value_of(v, env) for v in eqn.invars]
        with eqn.ctx.manager:
            values = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        values = values if eqn.primitive.multiple_results else [values]
        env.update(zip(eqn.outvars, values, strict=True))


def needed_equations(
    equations: Sequence[Equation], outputs: Iterable[Variable], *, known: set
) -> list[int]:
    """Return the indices of the equations that compute `outputs` from the `known` variables."""
    wanted = set(variables_of(outputs)) - known
    needed = []
    for i in reversed(range(len(equations))):
        if wanted.intersection(equations[i].outvars):
            needed.append(i)
            wanted.update(v for v in variables_of(equations[i].invars) if v not in known)
    return needed[::-1]


def value_of(variable: Variable, env: Environment) -> Any:
    """Return the value of a variable or a literal."""
    return variable.val if isinstance(variable, Literal) else env[variable]


def variables_of(values: Iterable[Variable]) -> list[Variable]:
    """Return the distinct variables among variables and literals, in order."""
    return list(dict.fromkeys(v for v in values if not isinstance(v, Literal)))
