"""Walks traced functions: all their equations, how often each runs, and the FLOPs of products.

A jaxpr lists the equations of a function. Some of them contain jaxprs of their own: calls, loops
and branches. For `jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)` with 8 matrices, the
walk gives

    equation       times
    scan           1
    dot_general    8
    tanh           8
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, jaxprs_in_params

#: A `JaxprEqn`. As jax declares it, the types of its variables have neither shape nor memory space.
Equation = Any


def walk(equations: Iterable[Equation], times: int = 1) -> Iterator[tuple[Equation, int]]:
    """Yield equations and, after each of them, all equations of the jaxprs that it contains.

    Args:
        equations: the equations, such as `jaxpr.eqns`.
        times: how often they run.

    Yields:
        (equation, number of executions). Every iteration of a scan counts, and every branch of a
        conditional counts as if it were always taken. The body of a while loop counts once.
    """
    for eqn in equations:
        yield eqn, times
        inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
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
