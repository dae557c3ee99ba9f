"""The training and evaluation steps, as pure functions that are jitted once.

The path of a batch through the training step, with M microbatches of B examples:

    batch [M·B, ...]
      -> equalize the sums of loss weights, and scale them for float16
      -> a dropout key per example, from its index
      -> microbatches [M, B, ...]
      -> teacher outputs, for a model that learns from the average of its parameters
      -> loss_and_grad: the pipeline schedule; sums of losses, weights and gradients
      -> divide the losses and metrics by the sums of their weights, for the log
      -> update (update.py): divide the gradients by it, clip, apply the optimizer; skipped if the
         step is nonfinite or a spike

The metrics of a training step are scalars: `loss, grad_norm, num_skipped, num_nonfinite_in_a_row`,
`learning_rate` if it is known (see train/optim/logged_rate.py), and the head's metrics as weighted
means (means.py). In float16 there are two more: `loss_scale`, and `num_stuck_in_a_row`, the
nonfinite steps at which the scale could not become smaller. In float8 with delayed scaling there
are `float8_overflows` and `float8_underflows`; see train/state/amax_history.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.functions import ModelFunctions
from pipeline.runtime.executor import make_evaluate, make_loss_and_grad, make_teach
from pipeline.runtime.gather import ParamSharding
from pipeline.schedule import forward_only
from pipeline.schedules.table import Schedule
from pipeline.stack_layout import StackLayout
from sharding.hardware import Hardware
from sharding.logical import Rules, axis_rules
from sharding.memory import to_device, to_where
from sharding.ops.sequence import SequenceSplit
from train.optim.logged_rate import rate_of_update
from train.precision import PrecisionConfig
from train.state.amax_history import (
    misfit_metrics,
    update_history,
    with_scaled_blocks,
    with_scaling,
    with_scaling_specs,
    without_scaling,
)
from train.state.train_state import TrainState, average_of
from train.step.means import gradient_weight, means_of, nonzero
from train.step.spikes import detect_spike
from train.step.tracing import traced_for
from train.step.update import StepOutcome, Update

_DROPOUT_TAG = 0x0D0D

Tree = Any
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The settings that both the training step and the evaluation step are built from."""

    schedule: Schedule  # pipeline schedule, verified
    recomputes_stages: bool  # whether backwards run the forward of their chunk again
    shares_vocab: bool  # whether all stages compute embedding and head together
    layouts: Mapping[str, StackLayout]  # stack -> layers of every stage
    unrolls: bool  # whether the training step has no loops over layers
    precision: PrecisionConfig
    seed: int  # for dropout
    skip_spikes: float | None  # largest gradient norm / running mean; None: any
    hardware: Hardware  # devices that the step is compiled for
    attention: str  # `model.attention`: one of models.layers.attention.SETTINGS
    sequence: SequenceSplit  # how sequences are divided over `context`

    def traced(self) -> AbstractContextManager[None]:
        """Return a context in which functions are traced for these settings."""
        return traced_for(self.hardware, self.attention, self.sequence)


def make_train_step(
    functions: ModelFunctions,
    update: Update,
    learning_rate_schedule: optax.Schedule | None,
    config: StepConfig,
    param_sharding: ParamSharding,
    rules: Rules,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Build the function `train_step(state, batch) -> (state, metrics)`.

    The batch contains the inputs of the model's `embed` and `head`, including `weights`, and
    `index` uint32[M·B], the number of each example in the run.

    The loss is the sum over all microbatches and devices, divided by the sum of `weights`. The
    weights of additional losses, `*_weights`, are first scaled to the same sum.

    A step whose loss or gradients are not finite changes only the counters, and in float16 the loss
    scale. With `skip_spikes`, the same holds for a step whose gradient norm exceeds this multiple
    of the mean norm of the accepted steps before it.

    Args:
        functions: model's functions.
        update: optimizer update.
        learning_rate_schedule: for the metric; the optimizer follows the same. None: the optimizer
            is not a built-in one.
        config: all other settings of the step.
        param_sharding: how the parameters are sharded over the mesh.
        rules: sharding rules.
    """
    loss_and_grad = _make_loss_and_grad(functions, config, param_sharding)
    teach = make_teacher(functions, config, param_sharding)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = _with_loss_weights(batch, state, config)
        keys = _dropout_keys(batch, config.seed)
        with axis_rules(rules), config.traced():
            microbatches = to_microbatches(batch, config)
            if teach is not None:
                microbatches |= teach(average_of(state), microbatches)
            microbatches |= to_microbatches({"dropout_keys": keys}, config)
            parts = _split_params(state, functions, config)
            sums, grads = loss_and_grad(parts, microbatches)
            grads, seen = _join_gradients(grads, state, functions)
        metrics = means_of(sums, lambda value, weight: value / nonzero(weight))
        weight = gradient_weight(sums["weight"])
        grad_norm = update.norm(grads, weight)
        num_skipped = state.num_skipped
        num_updates = state.step - num_skipped  # as the optimizer counts
        metrics |= {"grad_norm": grad_norm, **_scaling_metrics(state, seen, config)}
        state = _apply_gradients(
            state, grads, weight, metrics["loss"], grad_norm, seen, update, config
        )
        if functions.after_update is not None:
            layers = {name: layout.layer_of_slot for name, layout in config.layouts.items()}
            state = _add_changes(state, functions.after_update(sums, layers), num_skipped)
        metrics |= rate_of_update(state.opt_state, learning_rate_schedule, num_updates)
        return state, metrics | _counters(state)

    return train_step


def make_eval_step(
    functions: ModelFunctions,
    config: StepConfig,
    param_sharding: ParamSharding,
    rules: Rules,
) -> Callable[[Tree, Tree | None, Batch], dict[str, Tree]]:
    """Build the function `eval_step(params, teacher, batch) -> sums`.

    Its first two arguments come from train.run.run.Run.params_to_evaluate. The sums are
    `loss`, `weight` and the head's metrics, to be added up over all batches and then divided
    (means.py).

    Args:
        functions: model's functions.
        config: settings of the step.
        param_sharding: how the parameters are sharded over the mesh.
        rules: sharding rules.
    """
    forwards = _forwards(config.schedule)
    evaluate = make_evaluate(
        functions, forwards, config.layouts, param_sharding, shares_vocab=config.shares_vocab
    )
    teach = make_teacher(functions, config, param_sharding)

    def eval_step(params: Tree, teacher: Tree | None, batch: Batch) -> dict[str, Tree]:
        with axis_rules(rules), config.traced():
            # The weights stay as they are: to even them out within a batch would give each batch
            # the same share of a mean, however many weights it has.
            microbatches = to_microbatches(batch, config)
            if teach is not None:
                microbatches |= teach(teacher, microbatches)
            return evaluate(functions.split(params), microbatches)

    return eval_step


def _make_loss_and_grad(
    functions: ModelFunctions, config: StepConfig, param_sharding: ParamSharding
) -> Callable[[Tree, Batch], tuple[dict, Tree]]:
    """Return `f(parts, microbatches) -> (sums, gradients of the parts)`; see `_split_params`."""
    if config.precision.keeps_amax_history:
        param_sharding = with_scaling_specs(param_sharding, functions)
        functions = with_scaled_blocks(functions)
    return make_loss_and_grad(
        functions,
        config.schedule,
        config.layouts,
        param_sharding,
        recomputes=config.recomputes_stages,
        shares_vocab=config.shares_vocab,
        unrolls=config.unrolls,
    )


def _split_params(state: TrainState, functions: ModelFunctions, config: StepConfig) -> Tree:
    """Return the parameters as the pipeline takes them: in parts, with their float8 scales."""
    parts = functions.split(state.params)
    history = state.amax_history
    if history is None:
        return parts
    return with_scaling(parts, history, functions, config.precision.compute_dtype)


def _join_gradients(
    grads: Tree, state: TrainState, functions: ModelFunctions
) -> tuple[Tree, Tree | None]:
    """Return (gradients of the parameters, seen).

    `seen` says which scales this step needed, in the form of the state's history; None without a
    history.
    """
    seen = None
    if state.amax_history is not None:
        grads, seen = without_scaling(grads, state.amax_history)
    return functions.join(grads), seen


def make_teacher(
    functions: ModelFunctions, config: StepConfig, param_sharding: ParamSharding
) -> Callable[[Tree, Batch], Batch] | None:
    """Return `f(teacher_params, microbatches) -> teacher_outputs`; None without a teacher."""
    if functions.teach is None:
        return None
    forwards = _forwards(config.schedule)
    teach = make_teach(
        functions, forwards, config.layouts, param_sharding, shares_vocab=config.shares_vocab
    )
    return lambda params, microbatches: teach(functions.split(params), microbatches)


def _forwards(schedule: Schedule) -> Schedule:
    """Return the forward passes of a training schedule."""
    return forward_only(
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_chunks,
        placement=schedule.placement,
    )


def _apply_gradients(
    state: TrainState,
    grads: Tree,
    weight: jax.Array,
    loss: jax.Array,
    grad_norm: jax.Array,
    seen: Tree | None,
    update: Update,
    config: StepConfig,
) -> TrainState:
    """Return the state after the step: updated, or with changed counters only.

    Args:
        state: state before the step.
        grads: sums of gradients.
        weight: sum of weights, by which `update` divides the gradients.
        loss: mean loss.
        grad_norm: global norm of the divided gradients.
        seen: scales that this step needed, as from `_join_gradients`.
        update: optimizer update.
        config: settings of the step.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    accepted = finite
    spikes = state.spikes
    loss_scale = state.loss_scale
    if config.skip_spikes is not None:
        assert spikes is not None
        accepted, spikes = detect_spike(spikes, grad_norm, finite, config.skip_spikes)
    if loss_scale is not None:
        loss_scale = loss_scale.after(finite, config.precision)
    history = state.amax_history
    if history is not None and seen is not None:
        history = update_history(history, seen, config.precision.float8_history, finite)
    in_a_row = state.num_nonfinite_in_a_row + jnp.where(finite, 0, 1)
    outcome = StepOutcome(step=state.step, weight=weight, norm=grad_norm, accepted=accepted)
    params, opt_state = update(state.params, state.opt_state, grads, outcome)
    return TrainState(
        step=state.step + 1,
        num_skipped=state.num_skipped + jnp.where(accepted, 0, 1),
        num_nonfinite_in_a_row=jnp.where(accepted, 0, in_a_row),
        params=params,
        opt_state=opt_state,
        spikes=spikes,
        loss_scale=loss_scale,
        amax_history=history,
    )


def _add_changes(
    state: TrainState, changes: Mapping[tuple[str, ...], jax.Array], num_skipped: jax.Array
) -> TrainState:
    """Add changes to parameters, unless the step was skipped.

    Args:
        state: state after the step.
        changes: path of a parameter -> its change.
        num_skipped: steps that were skipped before this one.
    """

    def changed(path: tuple, param: jax.Array) -> jax.Array:
        change = changes.get(tuple(key.key for key in path))
        if change is None:
            return param
        value = to_device(param)
        new = (value + change).astype(value.dtype)
        return to_where(jnp.where(state.num_skipped == num_skipped, new, value), param)

    params = jax.tree_util.tree_map_with_path(changed, state.params)
    return dataclasses.replace(state, params=params)


def _scaling_metrics(
    state: TrainState, seen: Tree | None, config: StepConfig
) -> dict[str, jax.Array]:
    """Return the metrics about the scales of float16 and float8, before the step.

    Args:
        state: state before the step.
        seen: as from `_join_gradients`.
        config: settings of the step.
    """
    metrics = {}
    if state.loss_scale is not None:
        metrics["loss_scale"] = state.loss_scale.value(config.precision)
    if state.amax_history is not None and seen is not None:
        metrics |= misfit_metrics(state.amax_history, seen)
    return metrics


def _counters(state: TrainState) -> dict[str, jax.Array]:
    """Return the metrics that count skipped and nonfinite steps, after the step."""
    counters = {
        "num_skipped": state.num_skipped,
        "num_nonfinite_in_a_row": state.num_nonfinite_in_a_row,
    }
    if state.loss_scale is not None:
        counters["num_stuck_in_a_row"] = state.loss_scale.num_stuck
    return counters


def _with_loss_weights(batch: Batch, state: TrainState, config: StepConfig) -> Batch:
    """Even out the weights of the losses, and scale them for float16.

    In float16, gradients are computed for `loss_scale` × the mean loss, until they are accumulated
    in float32. A nonfinite step reduces the scale.
    """
    batch = _with_even_weights(batch)
    if state.loss_scale is None:
        return batch
    # Scale the weights, not the gradients of the loss: a head may compute its gradients in its
    # forward pass.
    return _with_scaled_weights(batch, state.loss_scale.value(config.precision))


def _with_even_weights(batch: Batch) -> Batch:
    """Scale the weights of additional losses, `*_weights`, to the same sum as `weights`.

    All gradients are divided by one sum of weights in the end. With equal sums, they are the
    gradients of a sum of means, each over its own weights.
    """

    def scaled(weights: jax.Array) -> jax.Array:
        total = jnp.sum(weights)
        return weights * (jnp.sum(batch["weights"]) / jnp.where(total > 0, total, 1))

    return {name: scaled(a) if name.endswith("_weights") else a for name, a in batch.items()}


def _with_scaled_weights(batch: Batch, scale: jax.Array) -> Batch:
    """Scale all weights so that `weights` sum to `scale`: the loss becomes `scale` × its mean."""
    total = jnp.sum(batch["weights"])
    factor = scale / jnp.where(total > 0, total, 1)
    scaled = {name: a * factor for name, a in batch.items() if name.endswith("weights")}
    return {**batch, **scaled}


def _dropout_keys(batch: Batch, seed: int) -> jax.Array:
    """Return a key per example, key[M·B], which depends only on the seed and its index."""
    # Folded twice, so that no key equals one that an initial parameter was drawn from.
    base = jax.random.fold_in(jax.random.key(seed), _DROPOUT_TAG)
    return jax.vmap(jax.random.fold_in, (None, 0))(base, batch["index"])


def to_microbatches(batch: Batch, config: StepConfig) -> Batch:
    """Reshape a batch `[M·B, ...]` to `[M, B, ...]`: row r goes to microbatch r mod M.

    No row moves to another device. With M = 2, B = 4 and 2 replicas, which hold rows 0-3 and 4-7:

        microbatch 0: rows 0 2 | 4 6
        microbatch 1: rows 1 3 | 5 7
    """

    def cut(x: jax.Array) -> jax.Array:
        count = config.schedule.num_microbatches
        return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)

    return {name: cut(array) for name, array in batch.items()}
