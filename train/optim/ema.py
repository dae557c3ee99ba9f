"""An exponential moving average of the parameters, kept in the optimizer's state.

There it lies as moments do: shared out, on the host, in slots and in checkpoints.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("constant", "cosine")

Tree = Any


class Average(NamedTuple):
    """The state of `average_params`."""

    count: Any  # int32[], updates so far
    average: Tree  # like the parameters, float32 or wider; None for those that are frozen


def average_params(decay: float, schedule: str, num_steps: int) -> optax.GradientTransformation:
    """Returns what leaves updates as they are and averages the parameters that they lead to.

    It comes last in a chain. average = d × average + (1 - d) × parameters, beginning with the
    initial parameters.

    Args:
      decay: d; with the schedule "cosine" the first one, that of update t (from 0) being
        1 - (1 - decay) × (cos(π t / num_steps) + 1) / 2.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992);
    "cosine": Grill et al., "Bootstrap Your Own Latent" (2020), section 3.3.
    """

    def init(params: Tree) -> Average:
        return Average(count=jnp.zeros((), jnp.int32), average=jax.tree.map(jnp.copy, params))

    def step_size(count: jax.Array) -> Any:
        if schedule == "constant":
            return 1 - decay
        return (1 - decay) * (jnp.cos(count * (math.pi / num_steps)) + 1) / 2

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Average]:
        new = optax.apply_updates(params, updates)
        average = optax.incremental_update(new, state.average, step_size(state.count))
        return updates, Average(count=optax.safe_increment(state.count), average=average)

    return optax.GradientTransformation(init, update)


def with_average(opt_state: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """Returns the optimizer's state with `change(average)` for the average, if it has one."""
    return jax.tree.map(
        lambda part: part._replace(average=change(part.average)) if _is_average(part) else part,
        opt_state,
        is_leaf=_is_average,
    )


def find_average(opt_state: Tree) -> Tree | None:
    """Returns the average in an optimizer's state, or None if it has none."""
    parts = jax.tree.leaves(opt_state, is_leaf=_is_average)
    return next((part.average for part in parts if _is_average(part)), None)


def _is_average(part: Any) -> bool:
    return isinstance(part, Average)
