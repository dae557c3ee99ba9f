"""An update that runs only if a condition holds, and then updates its arrays in place.

`jax.lax.cond` is the natural way to write one, but XLA may copy every array that a conditional
passes through: on GPUs with jax 0.10, all buffers and gradient sums of a pipeline were copied in
every tick. A loop carries its state in the same memory from one iteration to the next, so a loop
that runs at most once copies nothing:

    state ---> [ while predicate:  state, predicate = update(state), False ] ---> state
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

State = TypeVar("State")

#: Named scope of the loop. XLA keeps scope names, so the analysis of compiled programs can tell
#: such a loop from one that repeats.
AT_MOST_ONCE = "at_most_once"


@dataclasses.dataclass(frozen=True)
class Condition:
    """When an update runs.

    Attributes:
        predicate: returns bool[], the value at run time; called in the scope of the update.
        known: value of the predicate if it is known during tracing, else None. If it is known, no
            loop is traced.
        scope: named scope of the update, by which predict/time/ finds it; None: no scope.
    """

    predicate: Callable[[], jax.Array]
    known: bool | None = None
    scope: str | None = None


def update_if(condition: Condition, update: Callable[[State], State], state: State) -> State:
    """Return update(state) if the condition holds, else `state`.

    Args:
        condition: when to update.
        update: (state) -> state of the same shapes and dtypes.
        state: tree of arrays.
    """

    def once(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return jnp.zeros((), bool), update(carry[1])

    scope = condition.scope
    with contextlib.nullcontext() if scope is None else jax.named_scope(scope):
        predicate = condition.predicate()
        if condition.known is not None:
            return update(state) if condition.known else state
        with jax.named_scope(AT_MOST_ONCE):
            return jax.lax.while_loop(lambda carry: carry[0], once, (predicate, state))[1]
