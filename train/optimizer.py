"""Optimizers and learning-rate schedules as optax chains."""

import dataclasses
import pkgutil
from typing import Any

import jax
import optax

SCHEDULES = ("cosine", "linear", "constant")

#: Parameters of these names are not decayed: biases, and the scales of norms.
NOT_DECAYED = ("bias", "scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer, its learning rate over the steps, decay and clipping."""

    name: str  # "adamw", or an import path "package.module:function"; see make_optimizer
    learning_rate: float  # its peak
    warmup_steps: int  # linear rise; the first step's rate is learning_rate / warmup_steps
    schedule: str  # after warm-up: one of SCHEDULES
    final_learning_rate_fraction: float  # of the peak, at the last step; not for "constant"
    weight_decay: float  # decoupled, times the learning rate; none on biases and norms
    clip_norm: float  # largest global gradient norm; 0 switches clipping off
    beta1: float
    beta2: float
    epsilon: float

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"optimizer.schedule={self.schedule!r} is unknown; choose {', '.join(SCHEDULES)}"
            )
        for name in ("learning_rate", "warmup_steps", "weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must not be negative")
        if self.epsilon <= 0:
            raise ValueError(f"optimizer.epsilon={self.epsilon} must be positive")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must lie in [0, 1)")
        if not 0.0 <= self.final_learning_rate_fraction <= 1.0:
            raise ValueError(
                "optimizer.final_learning_rate_fraction="
                f"{self.final_learning_rate_fraction} must lie in [0, 1]"
            )


def make_learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate of every update: int32 count -> float32."""
    peak, warmup = config.learning_rate, config.warmup_steps
    final, rest = peak * config.final_learning_rate_fraction, max(num_steps - 1 - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, config.final_learning_rate_fraction),
        "linear": optax.linear_schedule(peak, final, rest),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    # The first update already moves: its rate is peak / warmup, not 0.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def decay_mask(params: Any) -> Any:
    """Returns the tree of bools that says which parameters are decayed."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: getattr(path[-1], "key", None) not in NOT_DECAYED and leaf.ndim > 1,
        params,
    )


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, *, clips: bool = True
) -> optax.GradientTransformation:
    """Returns clipping by global norm, then the optimizer.

    A name with a colon is the import path of a function `(config: OptimizerConfig, schedule) ->
    optax.GradientTransformation`.

    Args:
      clips: False leaves clipping to the caller; the optimizer's state looks the same.

    Raises:
      ValueError: the name stands for no optimizer.
    """
    optimizer: Any
    if config.name == "adamw":
        optimizer = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    else:
        try:
            make = pkgutil.resolve_name(config.name)
            if not callable(make):
                raise ValueError(f"it names a {type(make).__name__}")
        except (ValueError, ImportError, AttributeError) as error:
            raise ValueError(
                f"optimizer.name={config.name!r} is neither 'adamw' nor an import path "
                f"'package.module:function': {error}"
            ) from None
        optimizer = make(config, schedule)
    clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip if clips and config.clip_norm else optax.identity(), optimizer)
