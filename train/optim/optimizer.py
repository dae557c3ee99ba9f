"""Optimizers, built from optax transformations."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from models.adapters import is_adapter
from models.scaling import ParamScales
from train.optim.config import OPTIMIZERS, OptimizerConfig
from train.optim.layer_decay import Depths, scaled_by_depth
from train.optim.matrices import Matrices, for_matrices, path_names
from train.optim.muon import scale_by_muon
from train.optim.per_layer import check_independent, per_layer
from train.optim.schedule_free import schedule_free
from train.optim.shampoo import scale_by_shampoo
from untrusted.imports import import_object

Tree = Any

#: Names of parameters without weight decay in every model: biases, and the scales of norms. Names
#: are needed because a bias can have two dimensions, such as heads and head_dim.
NOT_DECAYED = ("bias", "scale")

#: Trust coefficient of LARS: norm of an update / norm of the weights, before the learning rate.
TRUST_COEFFICIENT = 0.001


def decay_mask(params: Tree, *, not_decayed: Collection[str] = ()) -> Tree:
    """Return a bool per parameter: whether weight decay applies to it.

    It applies to matrices and embedding tables, but not to vectors, to NOT_DECAYED, or to DoRA's
    magnitudes, which PEFT stores as vectors.

    Args:
        params: tree of parameters of one layer (see per_layer.py).
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
        return leaf.ndim > 1

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def make_optimizer(
    config: OptimizerConfig,
    learning_rate_schedule: optax.Schedule,
    *,
    params: Tree,
    stacks: Collection[str] = (),
    not_decayed: Collection[str] = (),
    matrices: Matrices | None = None,
    compute_dtype: Any = "float32",
    depths: Depths | None = None,
    scales: ParamScales | None = None,
    average: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Build a run's optimizer and the parameter average, without clipping.

    `Update` (train/step/update.py) clips the gradients before it calls the optimizer.

    If `config.name` is none of OPTIMIZERS, it is the import path of a function
    `(config: OptimizerConfig, schedule) -> optax.GradientTransformation`.

    Args:
        config: optimizer and its hyperparameters.
        learning_rate_schedule: learning rate of every update.
        params: trained parameters, as arrays or ShapeDtypeStructs.
        stacks: first keys of parameters with shape `[slots, ...]`, which hold one tensor per slot.
        not_decayed: names from the model's class; see models/stack.py.
        matrices: matrices of the stacks, for Muon and Shampoo.
        compute_dtype: dtype of the products of matrices, for Muon.
        depths: depths of the parameters; required if `layer_decay` is not 1.
        scales: factors of AdamW's hyperparameters; None: all are 1. See models/scaling.py.
        average: transformation that averages the parameters; see train/optim/ema.py.

    Raises:
        ValueError: `config.name` is neither an optimizer nor an import path, or the optimizer
            cannot update layers separately.
    """
    mask = partial(decay_mask, not_decayed=not_decayed)
    if config.name == "muon":
        optimizer = _make_muon(config, learning_rate_schedule, mask, matrices or {}, compute_dtype)
    elif config.name == "shampoo":
        optimizer = _make_shampoo(config, learning_rate_schedule, mask, matrices or {})
    elif scales is not None:
        assert config.name == "adamw"
        optimizer = _make_scaled_adamw(config, learning_rate_schedule, mask, scales)
    elif config.is_built_in:
        optimizer = _make_named(config, learning_rate_schedule, mask)
    else:
        optimizer = _make_imported(config, learning_rate_schedule)
        check_independent(optimizer, params, stacks, config.name)
    optimizer = per_layer(optimizer, stacks)
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
    config: OptimizerConfig, learning_rate_schedule: optax.Schedule, mask: Callable[[Tree], Tree]
) -> optax.GradientTransformation:
    if config.name == "adamw":
        return _make_adamw(config, learning_rate_schedule, mask)
    decay = optax.add_decayed_weights(config.weight_decay, mask=mask)
    rate = optax.scale_by_learning_rate(learning_rate_schedule)
    momentum = optax.trace(config.momentum) if config.momentum else optax.identity()
    match config.name:
        case "lion":
            return optax.chain(optax.scale_by_lion(config.beta1, config.beta2), decay, rate)
        case "adafactor":
            # Clipping and scaling of each tensor, as in section 5 of the paper.
            factored = optax.scale_by_factored_rms()
            clip = optax.clip_by_block_rms(1.0)
            return optax.chain(factored, clip, optax.scale_by_param_block_rms(), decay, rate)
        case "schedule_free":
            scale = optax.scale_by_rms(
                config.beta2, config.epsilon, eps_in_sqrt=False, bias_correction=True
            )
            base = optax.chain(scale, decay, rate)
            return schedule_free(base, learning_rate_schedule, config.beta1)
        case "lamb":
            adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
            return optax.chain(adam, decay, optax.masked(optax.scale_by_trust_ratio(), mask), rate)
        case "lars":
            ratio = optax.scale_by_trust_ratio(trust_coefficient=TRUST_COEFFICIENT)
            return optax.chain(decay, optax.masked(ratio, mask), rate, momentum)
        case _:
            return optax.chain(decay, momentum, rate)


def _make_adamw(
    config: OptimizerConfig, learning_rate: optax.Schedule, mask: Callable[[Tree], Tree]
) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=mask,
    )


def _make_scaled_adamw(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    mask: Callable[[Tree], Tree],
    scales: ParamScales,
) -> optax.GradientTransformation:
    """Return AdamW whose learning rate and epsilon are multiplied by factors of each parameter."""

    def multiplied(factors: Mapping[tuple[str, ...], float]) -> optax.GradientTransformation:
        def update(updates: Tree, params: Tree) -> Tree:
            def scaled(path: tuple, x: Any) -> Any:
                return x * factors[path_names(path)]

            return jax.tree_util.tree_map_with_path(scaled, updates)

        return optax.stateless(update)

    return optax.chain(
        # g / (|g| + c ε) equals (g / c) / (|g / c| + ε).
        multiplied({path: 1 / scale.epsilon for path, scale in scales.items()}),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        multiplied({path: scale.rate for path, scale in scales.items()}),
        # After the factor: the decay of a kernel does not depend on its size.
        optax.add_decayed_weights(config.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _make_muon(
    config: OptimizerConfig,
    learning_rate_schedule: optax.Schedule,
    mask: Callable[[Tree], Tree],
    matrices: Matrices,
    compute_dtype: Any,
) -> optax.GradientTransformation:
    """Return Muon for `matrices`, and AdamW for all other parameters."""
    dtype = np.dtype("bfloat16" if compute_dtype == "float16" else compute_dtype)
    muon = optax.chain(
        scale_by_muon(matrices, config.momentum, config.muon_scale, dtype),
        optax.add_decayed_weights(config.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate_schedule),
    )

    def adamw_rate(count: Any) -> Any:
        return config.muon_adamw_rate * learning_rate_schedule(count)

    adamw = _make_adamw(config, adamw_rate, mask)
    return for_matrices("muon", matrices, muon, adamw)


def _make_shampoo(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    mask: Callable[[Tree], Tree],
    matrices: Matrices,
) -> optax.GradientTransformation:
    """Return Shampoo for `matrices`, and AdamW for all other parameters."""
    shampoo = optax.chain(
        scale_by_shampoo(
            matrices,
            beta1=config.beta1,
            beta2=config.beta2,
            epsilon=config.epsilon,
            max_block=config.shampoo_block,
            every=config.shampoo_every,
        ),
        optax.add_decayed_weights(config.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return for_matrices("shampoo", matrices, shampoo, _make_adamw(config, learning_rate, mask))


def _make_imported(config: OptimizerConfig, learning_rate_schedule: optax.Schedule) -> Any:
    make = import_object(config.name, "optimizer.name", OPTIMIZERS)
    if not callable(make):
        raise ValueError(
            f"optimizer.name={config.name!r} is of type {type(make).__name__}, but must be a "
            "function of the config and the schedule that returns an optimizer"
        )
    if (getattr(make, "__module__", None) or "").partition(".")[0] == "optax":
        raise ValueError(
            f"optimizer.name={config.name!r} is a function of hyperparameters, but must be one of "
            "the config and the schedule; write a function such as 'def mine(config, schedule): "
            f"return optax.{make.__name__}(schedule)', and name that"
        )
    return make(config, learning_rate_schedule)
