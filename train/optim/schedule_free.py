"""Schedule-free learning: the gradient is taken between the optimizer's iterate and its average.

    z   iterate of the base optimizer          not stored: z = (y - β x) / (1 - β)
    x   average of z, which is evaluated       stored as the run's average, as in ema.py
    y   β x + (1 - β) z                        the parameters, where gradients are taken

optax stores z, and computes x from it. Here x is stored, so evaluations, conversions and
`init_from` read it as they read any average of the parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from train.optim.ema import Average

Tree = Any


def schedule_free(
    base: optax.GradientTransformation, learning_rate: optax.Schedule, beta: float
) -> optax.GradientTransformation:
    """Make an optimizer without momentum schedule-free.

    Args:
        base: optimizer of the iterate z, without momentum.
        learning_rate: schedule of the base optimizer; averages are weighted by its square.
        beta: β, above 0.

    Source: Defazio et al., "The Road Less Scheduled" (2024), arXiv:2405.15682.
    """
    # optax counts updates from 1, but calls the base optimizer's schedule from 0.
    inner = optax.contrib.schedule_free(base, lambda count: learning_rate(count - 1), b1=beta)

    def init(params: Tree) -> Average:
        state: Any = inner.init(params)
        average = jax.tree.map(jnp.copy, params)
        return Average(count=jnp.zeros((), jnp.int32), average=average, inner=state._replace(z=()))

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Average]:
        z = jax.tree.map(lambda y, x: (y - beta * x) / (1 - beta), params, state.average)
        new: Any
        updates, new = inner.update(updates, state.inner._replace(z=z), params)
        y = optax.apply_updates(params, updates)
        x = jax.tree.map(lambda y, z: (y - (1 - beta) * z) / beta, y, new.z)
        count = optax.safe_increment(state.count)
        return updates, Average(count=count, average=x, inner=new._replace(z=()))

    return optax.GradientTransformation(init, update)
