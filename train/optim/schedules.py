"""Learning-rate schedules: a warmup, then a decay.

update              0 1 ... warmup_steps - 1   ...   num_steps - 1
rate                rises to the peak          falls to its end
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import optax

from train.optim.config import RATE_SCHEDULES, OptimizerConfig
from untrusted.imports import import_object

#: Shapes of the decay of "wsd": share of the decay in [0, 1] -> share of the rate that remains.
#: Source of "sqrt": Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
#: Durations" (2024), arXiv:2405.18392, section 3.
_REMAINDERS: Mapping[str, Callable[[Any], Any]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + jnp.cos(math.pi * t)) / 2,
    "sqrt": lambda t: 1 - jnp.sqrt(t),
}


def make_learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning-rate schedule: warmup, then decay.

    If `config.schedule` is none of RATE_SCHEDULES, it is the import path of a function
    `(config: OptimizerConfig, num_steps) -> schedule`, whose schedule has a warmup of its own.

    Args:
        config: peak, warmup and decay.
        num_steps: length of the run; the decay ends at its last step.

    Returns:
        A function int32 count of updates -> float32 learning rate.

    Raises:
        ValueError: the schedule cannot be imported.
    """
    if config.schedule not in RATE_SCHEDULES:
        return _make_imported(config, num_steps)
    peak = config.learning_rate
    warmup = config.warmup_steps
    # A linear warmup starts at peak / warmup instead of 0, so that the first update has an effect.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if config.warmup_type == "log":
        rise = partial(_logarithmic, peak, warmup)
    if config.schedule in ("piecewise", "wsd"):
        # Their steps count from the start of the run, and may be steps of the warmup.
        share = _milestones(config) if config.schedule == "piecewise" else _wsd(config, num_steps)

        def schedule(count: Any) -> Any:
            return share(count) * jnp.where(count < warmup, rise(count), peak)

        return schedule
    decay = _after_warmup(config, num_steps)
    return optax.join_schedules([rise, decay], [warmup]) if warmup else decay


def _make_imported(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    make = import_object(config.schedule, "optimizer.schedule", RATE_SCHEDULES)
    if not callable(make):
        raise ValueError(
            f"optimizer.schedule={config.schedule!r} is of type {type(make).__name__}, but must be "
            "a function of the config and the number of steps that returns a schedule"
        )
    schedule = make(config, num_steps)
    if not callable(schedule):
        raise ValueError(
            f"optimizer.schedule={config.schedule!r} returned {schedule!r}, but must return a "
            "function of the number of updates so far"
        )
    return cast(optax.Schedule, schedule)


def _after_warmup(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the schedule after the warmup, which counts updates from the end of the warmup."""
    peak = config.learning_rate
    fraction = config.final_learning_rate_fraction
    final = peak * fraction
    length = max(num_steps - 1 - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            return optax.constant_schedule(peak)
        case "inverse_sqrt":
            return partial(_inverse_sqrt, peak, config.warmup_steps)
        case "cosine":
            decay = optax.cosine_decay_schedule(peak, length, fraction)
        case "linear":
            decay = optax.linear_schedule(peak, final, length)
        case "polynomial":
            decay = optax.polynomial_schedule(peak, final, config.decay_power, length)
        case _:
            decay = _cosine_restarts(config, length)
    # In float32 the last rate of a decay can be slightly below its end, and so below 0.
    return partial(_at_least, decay, min(final, peak))


def _milestones(config: OptimizerConfig) -> optax.Schedule:
    """Return the share of the peak that remains after the milestones so far."""
    return optax.piecewise_constant_schedule(
        1.0, {step: config.milestone_factor for step in config.milestones}
    )


def _wsd(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the share of the peak in the stable part and the decay of "wsd".

    The rate of the stable part does not depend on the length of the run. So a checkpoint of it can
    be resumed with another `train.num_steps`, whose last `decay_steps` steps then decay.

    Source: Hu et al., "MiniCPM" (2024), arXiv:2404.06395, section 4.
    """
    last_stable = num_steps - 1 - config.decay_steps
    fraction = config.final_learning_rate_fraction
    remainder = _REMAINDERS[config.decay_shape]

    def share(count: Any) -> Any:
        t = jnp.clip((count - last_stable) / config.decay_steps, 0, 1)
        # In float32 the remainder can be slightly below 0.
        return fraction + (1 - fraction) * jnp.maximum(remainder(t), 0)

    return share


def _inverse_sqrt(peak: float, num_warmup: int, count: Any) -> Any:
    """Return peak × sqrt(warmup / n) for the update n, counted from 1 at the start of the run.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 5.3.
    """
    return peak * jnp.sqrt(max(num_warmup, 1) / (count + num_warmup + 1))


def _cosine_restarts(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return cosines one after another, each `cycle_factor` times as long as the one before.

    Source: Loshchilov and Hutter, "SGDR" (2017), arXiv:1608.03983, section 3.
    """

    def cosine(length: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(
            config.learning_rate, length, config.final_learning_rate_fraction
        )

    length = config.cycle_steps
    if config.cycle_factor == 1:
        return partial(_repeat, cosine(length), length)
    cosines = [cosine(length)]
    starts: list[int] = []
    while length <= num_steps - sum(starts[-1:]):
        starts.append(sum(starts[-1:]) + length)
        length *= config.cycle_factor
        cosines.append(cosine(length))
    return optax.join_schedules(cosines, starts)


def _repeat(schedule: optax.Schedule, num_steps: int, count: Any) -> Any:
    return schedule(count % num_steps)


def _at_least(schedule: optax.Schedule, lowest: float, count: Any) -> Any:
    return jnp.maximum(schedule(count), lowest)


def _logarithmic(peak: float, num_steps: int, count: Any) -> Any:
    """Return the rate of an update of a logarithmic warmup, as DeepSpeed's `WarmupLR`."""
    return peak * jnp.log1p(count) / math.log(max(num_steps, 2))
