"""Turns the sums of a model's head into means: each is divided by the sum of its own weights.

    sums     {"loss": s, "weight": w, "accuracy": a, "reward": (r, v)}
    means    {"loss": s / w, "accuracy": a / w, "reward": r / v}

`Extremes`, such as how often each expert was chosen, become the least and the largest mean:
`{"load": (Extremes([l, m]), u)}` gives `{"load_min": l / u, "load_max": m / u}`.

A model with several losses has a dict of each: `{"loss": {"a": s, "b": t}, "weight": {"a": w,
"b": v}}` gives `{"loss": s / w + t / v, "a": s / w, "b": t / v}`.

The sums are added up over all microbatches, devices and batches before they are divided. So a mean
does not depend on how rows are grouped.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from models.metrics import Extremes


def means_of(sums: Mapping[str, Any], divided: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return `loss` and the metrics.

    Args:
        sums: `loss`, `weight` and metrics, as a head returns them; see models/stack.py.
        divided: (sum, sum of its weights) -> their quotient.
    """
    metrics = {name: value for name, value in sums.items() if name not in ("loss", "weight")}
    loss = sums["loss"]
    weight = sums["weight"]
    if isinstance(loss, Mapping):
        means = {name: divided(value, weight[name]) for name, value in loss.items()}
        means["loss"] = sum(means.values())
    else:
        means = {"loss": divided(loss, weight)}
    for name, value in metrics.items():
        pair = value if isinstance(value, tuple) else (value, weight)
        if isinstance(pair[0], Extremes):
            means[f"{name}_min"] = divided(pair[0].sums.min(), pair[1])
            means[f"{name}_max"] = divided(pair[0].sums.max(), pair[1])
        else:
            means[name] = divided(*pair)
    return means


def gradient_weight(weight: Any) -> jax.Array:
    """Return the sum of weights that gradients are divided by, from the `weight` of a step's sums.

    The weights of several losses have been scaled to the same sum, unless a loss has none.
    """
    return nonzero(jnp.max(jnp.stack(jax.tree.leaves(weight))))


def nonzero(weight: jax.Array) -> jax.Array:
    """Return a sum of weights to divide by: 1 if there is no weight."""
    return jnp.where(weight > 0, weight, 1)
