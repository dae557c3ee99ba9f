"""The learning rate that an update used, for the log.

An optimizer of your own may use the schedule of the config, a schedule of its own, or none. The log
must not contain a rate that no update used, so this looks where the rate came from:

    optax.inject_hyperparams    the optimizer's state contains the rate
    the schedule of the config  it notices that the update called it
    anything else               the rate is unknown, and is not logged
"""

from typing import Any

import jax
import optax


class NoticedSchedule:
    """A schedule that notices whether a step calls it.

    A step is traced once, so this notices calls with traced counts, and not those with Python
    numbers while an optimizer is built.

    Args:
        schedule: function int32 count of updates -> float32 learning rate.

    Attributes:
        is_used: whether a step has called it.
    """

    def __init__(self, schedule: optax.Schedule):
        self._schedule = schedule
        self.is_used = False

    def __call__(self, count: Any) -> Any:
        """Return the learning rate."""
        self.is_used = self.is_used or isinstance(count, jax.Array)
        return self._schedule(count)


def rate_of_update(opt_state: Any, schedule: NoticedSchedule, count: jax.Array) -> dict[str, Any]:
    """Return the metric `learning_rate` of an update; no metric if there is no single rate.

    Call this after the update was traced.

    Args:
        opt_state: state of the optimizer after the update.
        schedule: the schedule of the config, which the optimizer may have called.
        count: int32, number of updates before this one.
    """
    injected = [
        rate
        for part in jax.tree.leaves(opt_state, is_leaf=_has_hyperparams)
        if _has_hyperparams(part) and (rate := part.hyperparams.get("learning_rate")) is not None
    ]
    if injected:
        is_single = len(injected) == 1 and injected[0].ndim == 0
        return {"learning_rate": injected[0]} if is_single else {}
    return {"learning_rate": schedule(count)} if schedule.is_used else {}


def _has_hyperparams(part: Any) -> bool:
    return isinstance(getattr(part, "hyperparams", None), dict)
