"""Optimizers and learning-rate schedules, built from optax transformations."""

import dataclasses
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fields.field import field
from fields.section import Section
from models.adapters import is_adapter
from train.optim.layer_decay import Depths, scaled_by_depth
from train.optim.trust_ratio import scale_by_layers_trust_ratio
from untrusted.imports import import_object

OPTIMIZERS = ("adamw", "lamb", "lars", "sgd")
#: Optimizers that treat every element independently, so that slices of an array can be updated one
#: at a time.
ELEMENTWISE = ("adamw", "sgd")
SCHEDULES = ("cosine", "linear", "constant")
WARMUPS = ("linear", "log")

#: Names of parameters without weight decay in every model: biases, and the scales of norms. Names
#: are needed because a bias can have two dimensions, such as heads and head_dim.
NOT_DECAYED = ("bias", "scale")

#: Trust coefficient of LARS: norm of an update / norm of the weights, before the learning rate.
TRUST_COEFFICIENT = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, section="optimizer"):
    """The optimizer, its learning-rate schedule, weight decay and clipping.

    See docs/optimizers.md.
    """

    name: str = field(
        "adamw",
        "The optimizer: `adamw`, `lamb`, `lars`, `sgd`, or `package.module:function` for one of "
        "your own (see docs/own_parts.md).",
        required=True,
    )
    learning_rate: float = field(1e-3, "Peak learning rate.", ge=0, required=True)
    warmup_steps: int = field(
        20,
        "Steps of warmup; the last of them has the peak learning rate.",
        ge=0,
        required=True,
    )
    warmup_type: str = field(
        "linear",
        "Rate of warmup step n / peak: `n / warmup_steps` (linear), or `log(n) / "
        "log(warmup_steps)` (log), which is 0 in the first step.",
        choices=WARMUPS,
    )
    schedule: str = field("cosine", "Decay after the warmup.", choices=SCHEDULES, required=True)
    final_learning_rate_fraction: float = field(
        0.1, "Last rate / peak; not for `schedule=constant`.", ge=0, le=1, required=True
    )
    weight_decay: float = field(
        0.1,
        "Weight decay, multiplied by the learning rate. It does not apply to biases, norm scales, "
        "other vectors and the parameters that the model names in `not_decayed`.",
        ge=0,
        required=True,
    )
    clip_norm: float = field(
        1.0, "Largest global gradient norm; 0: no clipping.", ge=0, required=True
    )
    beta1: float = field(
        0.9, "For `adamw` and `lamb`: decay of the first moment.", ge=0, lt=1, required=True
    )
    beta2: float = field(
        0.95, "For `adamw` and `lamb`: decay of the second moment.", ge=0, lt=1, required=True
    )
    epsilon: float = field(
        1e-8,
        "For `adamw` and `lamb`: added to the root of the second moment.",
        gt=0,
        required=True,
    )
    momentum: float = field(
        0.9, "For `lars` and `sgd`: momentum; 0: no momentum is kept.", ge=0, lt=1
    )
    layer_decay: float = field(
        1.0,
        "Layer-wise decay: the update of layer l of L is multiplied by `layer_decay ** (L - l)`; "
        "1: none.",
        gt=0,
        le=1,
        remedy="choose for example 0.75, or 1 for none",
    )
    frozen: tuple = field(
        (),
        "Parameters that are not trained: names, in which `*` matches anything, such as "
        "`token_embedding,encoder.*`.",
        nonempty=True,
        splits=True,
        remedy="write for example ('token_embedding',)",
    )

    @property
    def is_built_in(self) -> bool:
        """Whether the optimizer is one of OPTIMIZERS, not one of your own."""
        return self.name in OPTIMIZERS

    @property
    def is_elementwise(self) -> bool:
        """Whether it is one of ELEMENTWISE, which state in host memory requires."""
        return self.name in ELEMENTWISE


def make_learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning-rate schedule: warmup, then decay.

    Args:
        config: peak, warmup and decay.
        num_steps: length of the run; the decay ends at its last step.

    Returns:
        A function int32 count of updates -> float32 learning rate.
    """
    peak = config.learning_rate
    warmup = config.warmup_steps
    final = peak * config.final_learning_rate_fraction
    decay_steps = max(num_steps - 1 - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(
            peak, decay_steps, config.final_learning_rate_fraction
        ),
        "linear": optax.linear_schedule(peak, final, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    # In float32 the last rate of a decay can be slightly below its end, and so below 0.
    decay = partial(_at_least, after, min(final, peak))
    # A linear warmup starts at peak / warmup instead of 0, so that the first update has an effect.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if config.warmup_type == "log":
        rise = partial(_logarithmic, peak, warmup)
    return optax.join_schedules([rise, decay], [warmup]) if warmup else decay


def _at_least(schedule: optax.Schedule, lowest: float, count: Any) -> Any:
    return jnp.maximum(schedule(count), lowest)


def _logarithmic(peak: float, num_steps: int, count: Any) -> Any:
    """Return the rate of an update of a logarithmic warmup, as DeepSpeed's `WarmupLR`."""
    return peak * jnp.log1p(count) / math.log(max(num_steps, 2))


def decay_mask(params: Any, *, stacks: Collection[str], not_decayed: Collection[str] = ()) -> Any:
    """Return a bool per parameter: whether weight decay applies to it.

    It applies to matrices and embedding tables, but not to vectors, to NOT_DECAYED, or to DoRA's
    magnitudes, which PEFT stores as vectors. A parameter of a stack counts as one layer's: a vector
    in each block is `[slots, D]`, and is still a vector.

    Args:
        params: tree of parameters.
        stacks: first keys of parameters with shape `[slots, ...]`, which hold one tensor per slot.
        not_decayed: names of additional parameters, or of modules, without weight decay.

    Raises:
        ValueError: `not_decayed` is a str instead of a collection of names.
    """
    if isinstance(not_decayed, str):
        raise ValueError(
            f"not_decayed={not_decayed!r} must be a collection of names: ({not_decayed!r},)"
        )

    def is_decayed(path: tuple, leaf: Any) -> bool:
        keys = [getattr(key, "key", None) for key in path]
        if keys[-1] in NOT_DECAYED or {*keys} & {*not_decayed}:
            return False
        if is_adapter(keys) and keys[-1] == "magnitude":
            return False
        num_dims = leaf.ndim - (keys[0] in stacks)
        return num_dims > 1

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def make_optimizer(
    config: OptimizerConfig,
    learning_rate_schedule: optax.Schedule,
    *,
    stacks: Collection[str] = (),
    not_decayed: Collection[str] = (),
    depths: Depths | None = None,
    average: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Build a run's optimizer and the parameter average, without clipping.

    `Update` (train/step/update.py) clips the gradients before it calls the optimizer.

    If `config.name` is none of OPTIMIZERS, it is the import path of a function
    `(config: OptimizerConfig, schedule) -> optax.GradientTransformation`.

    Args:
        config: optimizer and its hyperparameters.
        learning_rate_schedule: learning rate of every update.
        stacks: first keys of parameters with shape `[slots, ...]`, which hold one tensor per slot.
        not_decayed: names from the model's class; see models/stack.py.
        depths: depths of the parameters; required if `layer_decay` is not 1.
        average: transformation that averages the parameters; see train/optim/ema.py.

    Raises:
        ValueError: `config.name` is neither an optimizer nor an import path.
    """
    mask = partial(decay_mask, stacks=stacks, not_decayed=not_decayed)
    optimizer = _make_named(config, learning_rate_schedule, stacks, mask)
    if config.layer_decay != 1:
        assert depths is not None
        optimizer = scaled_by_depth(optimizer, config.layer_decay, depths)
    # The identity keeps the place of clipping in the saved optimizer state: `Update` clips, because
    # the global norm must be known before slices of the state are updated.
    parts = [optax.identity(), optimizer]
    if average is not None:
        parts.append(average)
    return optax.chain(*parts)


def _make_named(
    config: OptimizerConfig,
    learning_rate_schedule: optax.Schedule,
    stacks: Collection[str],
    mask: Callable[[Any], Any],
) -> optax.GradientTransformation:
    if config.name == "adamw":
        return optax.adamw(
            learning_rate_schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=mask,
        )
    decay = optax.add_decayed_weights(config.weight_decay, mask=mask)
    rate = optax.scale_by_learning_rate(learning_rate_schedule)
    momentum = optax.trace(config.momentum) if config.momentum else optax.identity()
    if config.name == "lamb":
        adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
        ratio = scale_by_layers_trust_ratio(stacks, mask)
        return optax.chain(adam, decay, ratio, rate)
    if config.name == "lars":
        ratio = scale_by_layers_trust_ratio(stacks, mask, TRUST_COEFFICIENT)
        return optax.chain(decay, ratio, rate, momentum)
    if config.name == "sgd":
        return optax.chain(decay, momentum, rate)
    return _make_imported(config, learning_rate_schedule)


def _make_imported(config: OptimizerConfig, learning_rate_schedule: optax.Schedule) -> Any:
    make = import_object(config.name, "optimizer.name", OPTIMIZERS)
    if not callable(make):
        raise ValueError(
            f"optimizer.name={config.name!r} is of type {type(make).__name__}, but must be a "
            "function of the config and the schedule that returns an optimizer"
        )
    return make(config, learning_rate_schedule)
