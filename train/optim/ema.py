"""Exponential moving average (EMA) of the parameters.

The average is a part of the optimizer state. So it is sharded, offloaded to host memory, stored in
slots and saved in checkpoints in the same way as Adam's moments.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

EMA_SCHEDULES = ("constant", "cosine")

Tree = Any


class Average(NamedTuple):
    """The optax state of `average_params`, and of `schedule_free` (schedule_free.py)."""

    count: Any  # int32[], updates so far
    average: Tree  # like the parameters, float32 or wider; None for frozen parameters
    inner: Any = ()  # state of the optimizer whose iterates are averaged; (): another part's


def average_params(decay: float, schedule: str, num_steps: int) -> optax.GradientTransformation:
    """Pass updates through unchanged and keep an average of the resulting parameters.

    After every update, average = d × average + (1 - d) × parameters. The average starts as the
    initial parameters. This must be the last transformation of a chain, since it needs the final
    updates.

    Args:
        decay: d. With the schedule "cosine", the decay of the first update.
        schedule: "constant", or "cosine": d rises to 1 at the last step. For update t (from 0),
            d = 1 - (1 - decay) × (cos(π t / num_steps) + 1) / 2.
        num_steps: length of the run, for "cosine".

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
    """Replace the average in an optimizer state by `change(average)`, if it has one."""
    return jax.tree.map(
        lambda part: part._replace(average=change(part.average)) if _is_average(part) else part,
        opt_state,
        is_leaf=_is_average,
    )


def find_average(opt_state: Tree) -> Tree | None:
    """Return the average in an optimizer state, or None if it has none."""
    parts = jax.tree.leaves(opt_state, is_leaf=_is_average)
    return next((part.average for part in parts if _is_average(part)), None)


def _is_average(part: Any) -> bool:
    return isinstance(part, Average)
