"""The learning rate that an update used, for the log.

The log must not contain a rate that no update used. The optimizers of this package use the schedule
of the config. An optimizer of your own may change it, or call it less often, so its rate is known
only if `optax.inject_hyperparams` has stored it in the optimizer's state.
"""

from typing import Any

import jax
import optax


def rate_of_update(
    opt_state: Any, schedule: optax.Schedule | None, count: jax.Array
) -> dict[str, Any]:
    """Return the metric `learning_rate` of an update; no metric if there is no single rate.

    Args:
        opt_state: state of the optimizer after the update.
        schedule: schedule that the optimizer follows; None for an optimizer of one's own.
        count: int32, number of updates before this one.
    """
    if schedule is not None:
        return {"learning_rate": schedule(count)}
    injected = [
        rate
        for part in jax.tree.leaves(opt_state, is_leaf=_has_hyperparams)
        if _has_hyperparams(part) and (rate := part.hyperparams.get("learning_rate")) is not None
    ]
    is_single = len(injected) == 1 and injected[0].ndim == 0
    return {"learning_rate": injected[0]} if is_single else {}


def _has_hyperparams(part: Any) -> bool:
    return isinstance(getattr(part, "hyperparams", None), dict)
