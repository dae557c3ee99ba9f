"""The training and the evaluation step: pure functions, jitted once."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.stack import Parts
from sharding.hardware import Hardware
from sharding.logical import Rules, axis_rules
from sharding.memory import MemoryConfig
from sharding.mesh import AnyMesh
from sharding.pipeline.config import PipelineConfig
from sharding.pipeline.layout import Layout
from sharding.pipeline.runtime.executor import make_evaluate, make_loss_and_grad, make_teach
from sharding.pipeline.runtime.gather import Sharing
from sharding.pipeline.schedule import Schedule, forward_only
from train.precision import PrecisionConfig
from train.state.averaged import averaged
from train.state.train_state import Spikes, TrainState
from train.step.tracing import traced_for
from train.step.update import StepOutcome, Update

#: Of the mean gradient norm, an accepted step: it forgets in some 100 of them.
SPIKE_MEAN_DECAY = 0.99
#: Before so many norms are in the mean nothing is called a spike.
MIN_NORMS = 20
#: After so many spikes in a row the next is taken for a new level: accepted, the mean begun anew.
MAX_SPIKES = 10

_DROPOUT_TAG = 0x0D0D

Tree = Any
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a step depends on beside the model: shapes of the work, not of the data."""

    pipeline: PipelineConfig
    schedule: Schedule  # of the pipeline; verified
    layouts: Mapping[str, Layout]  # of every stack
    precision: PrecisionConfig
    seed: int  # of dropout, and of rounding at random
    memory: MemoryConfig
    hardware: Hardware  # that the step is compiled for
    skip_spikes: float | None = None  # multiple of the mean gradient norm; None: of any size
    attention: str = "auto"  # one of models.layers.attention.CHOICES


def make_train_step(
    parts: Parts,
    update: Update,
    learning_rate: optax.Schedule,
    config: StepConfig,
    mesh: AnyMesh,
    rules: Rules,
    specs: Tree,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `train_step(state, batch) -> (state, metrics)`.

    Args:
      specs: the PartitionSpec of every parameter.

    The batch holds what the model's `embed` and `head` read, `weights` among it, and `index`
    uint32[B], each example's number in the run. The loss is the sum over all microbatches and
    devices, divided by the sum of `weights`; those of further losses, `*_weights`, are first
    brought to that sum. Metrics are scalars: `loss, grad_norm, learning_rate, num_skipped,
    num_nonfinite_in_a_row` and the head's, as weighted means. A step whose loss or gradients are
    not finite changes nothing but the counters, and with `skip_spikes` neither does one whose
    gradient norm is more than so many times the mean norm of the accepted steps before it.

    In float16 the gradients are those of `loss_scale` × the mean loss until they are added up in
    float32; a step that is not finite makes the scale smaller. `loss_scale` is a metric then, and
    `num_stuck_in_a_row`, the steps that were not finite where it could not become smaller.
    """
    sharing = _sharing(parts.split(specs), mesh, config)
    loss_and_grad = make_loss_and_grad(
        parts, config.schedule, config.layouts, sharing, config.pipeline
    )
    with_teacher_outputs = _with_teacher_outputs(parts, config, sharing)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = _with_even_weights(batch)
        if state.loss_scale is not None:
            # As weights, since a head may compute its gradients in its forward.
            batch = _with_scaled_weights(batch, state.loss_scale.value(config.precision))
        keys = _dropout_keys(batch, config.seed)
        with axis_rules(rules), traced_for(config.hardware, config.attention):
            microbatches = with_teacher_outputs(averaged(state), _to_microbatches(batch, config))
            microbatches |= _to_microbatches({"dropout_keys": keys}, config)
            sums, grads = loss_and_grad(parts.split(state.params), microbatches)
        weight = sums.pop("weight")
        weight = jnp.where(weight > 0, weight, 1)
        grads = parts.join(grads)
        metrics = {name: value / weight for name, value in sums.items()}
        metrics["grad_norm"] = update.norm(grads, weight)
        metrics["learning_rate"] = learning_rate(state.step - state.num_skipped)
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.value(config.precision)
        state = _next(state, grads, weight, metrics, update, config)
        metrics["num_skipped"] = state.num_skipped
        metrics["num_nonfinite_in_a_row"] = state.num_nonfinite_in_a_row
        if state.loss_scale is not None:
            metrics["num_stuck_in_a_row"] = state.loss_scale.num_stuck
        return state, metrics

    return train_step


def make_eval_step(
    parts: Parts,
    config: StepConfig,
    mesh: AnyMesh,
    rules: Rules,
    specs: Tree,
) -> Callable[[Tree, Tree | None, Batch], dict[str, jax.Array]]:
    """Returns `eval_step(params, teacher, batch) -> sums`, of `loss`, `weight` and metrics.

    Its first two arguments are what train.state.averaged.evaluated gives of a state.
    """
    sharing = _sharing(parts.split(specs), mesh, config)
    forwards = _forwards(config.schedule)
    evaluate = make_evaluate(parts, forwards, config.layouts, sharing, config.pipeline)
    with_teacher_outputs = _with_teacher_outputs(parts, config, sharing)

    def eval_step(params: Tree, teacher: Tree | None, batch: Batch) -> dict[str, jax.Array]:
        with axis_rules(rules), traced_for(config.hardware, config.attention):
            microbatches = _to_microbatches(_with_even_weights(batch), config)
            return evaluate(parts.split(params), with_teacher_outputs(teacher, microbatches))

    return eval_step


def _with_teacher_outputs(
    parts: Parts, config: StepConfig, sharing: Sharing
) -> Callable[[Tree | None, Batch], Batch]:
    """Returns `f(teacher's parameters, microbatches) -> microbatches with what it teaches`."""
    if parts.teach is None:
        return lambda teacher, microbatches: microbatches
    forwards = _forwards(config.schedule)
    teach = make_teach(parts, forwards, config.layouts, sharing, config.pipeline)

    def with_teacher_outputs(teacher: Tree | None, microbatches: Batch) -> Batch:
        assert teacher is not None
        return microbatches | teach(parts.split(teacher), microbatches)

    return with_teacher_outputs


def _forwards(schedule: Schedule) -> Schedule:
    """Returns the forwards alone of a schedule for training."""
    return forward_only(
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_chunks,
        placement=schedule.placement,
    )


def _sharing(specs: Tree, mesh: AnyMesh, config: StepConfig) -> Sharing:
    return Sharing(
        mesh=mesh,
        specs=specs,
        memory=config.memory,
        compute_dtype=config.precision.compute,
        reduce_dtype=config.precision.reduce,
    )


def _next(
    state: TrainState, grads: Tree, weight: jax.Array, metrics: dict, update: Update, config
) -> TrainState:
    finite = accepted = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    spikes, loss_scale = state.spikes, state.loss_scale
    if config.skip_spikes is not None:
        assert spikes is not None
        accepted, spikes = detect_spike(spikes, metrics["grad_norm"], finite, config.skip_spikes)
    if loss_scale is not None:
        loss_scale = loss_scale.after(finite, config.precision)
    in_a_row = state.num_nonfinite_in_a_row + jnp.where(finite, 0, 1)
    outcome = StepOutcome(
        step=state.step, weight=weight, norm=metrics["grad_norm"], accepted=accepted
    )
    params, opt_state = update(state.params, state.opt_state, grads, outcome)
    return TrainState(
        step=state.step + 1,
        num_skipped=state.num_skipped + jnp.where(accepted, 0, 1),
        num_nonfinite_in_a_row=jnp.where(accepted, 0, in_a_row),
        params=params,
        opt_state=opt_state,
        spikes=spikes,
        loss_scale=loss_scale,
    )


def detect_spike(
    spikes: Spikes, norm: jax.Array, finite: jax.Array, skip_spikes: float
) -> tuple[jax.Array, Spikes]:
    """Returns whether a step with this gradient norm is accepted, and what is known after it."""
    mean = spikes.norm_mean / (1 - SPIKE_MEAN_DECAY ** jnp.maximum(spikes.num_norms, 1))
    is_high = finite & (spikes.num_norms >= MIN_NORMS) & (norm > skip_spikes * mean)
    is_spike = is_high & (spikes.num_in_a_row < MAX_SPIKES)
    accepted, is_new_level = finite & ~is_spike, is_high & ~is_spike
    norm_mean = jnp.where(is_new_level, 0, spikes.norm_mean)
    norm_mean = SPIKE_MEAN_DECAY * norm_mean + (1 - SPIKE_MEAN_DECAY) * norm
    num_norms = jnp.where(is_new_level, 0, spikes.num_norms) + 1
    return accepted, Spikes(
        norm_mean=jnp.where(accepted, norm_mean, spikes.norm_mean),
        num_norms=jnp.where(accepted, num_norms, spikes.num_norms),
        num_in_a_row=jnp.where(accepted, 0, spikes.num_in_a_row + jnp.where(is_spike, 1, 0)),
    )


def _with_even_weights(batch: Batch) -> Batch:
    """Returns the batch with the weights of a head's further losses as heavy as `weights`.

    Every `*_weights` is scaled so that its sum is that of `weights`: divided by that, as all sums
    of a head are, each loss is a mean over what has a weight in it.
    """

    def scaled(weights: jax.Array) -> jax.Array:
        total = jnp.sum(weights)
        return weights * (jnp.sum(batch["weights"]) / jnp.where(total > 0, total, 1))

    return {name: scaled(a) if name.endswith("_weights") else a for name, a in batch.items()}


def _with_scaled_weights(batch: Batch, scale: jax.Array) -> Batch:
    """Returns the batch with weights whose sum is `scale`: the loss is `scale` × its mean."""
    total = jnp.sum(batch["weights"])
    factor = scale / jnp.where(total > 0, total, 1)
    scaled = {name: a * factor for name, a in batch.items() if name.endswith("weights")}
    return {**batch, **scaled}


def _dropout_keys(batch: Batch, seed: int) -> jax.Array:
    """Returns a key per example, from the example's number alone."""
    # Folded twice, so that no key is one that an initial parameter was drawn from.
    base = jax.random.fold_in(jax.random.key(seed), _DROPOUT_TAG)
    return jax.vmap(jax.random.fold_in, (None, 0))(base, batch["index"])


def _to_microbatches(batch: Batch, config: StepConfig) -> Batch:
    """Returns `[M, B/M, ...]`: row r goes to microbatch r mod M, so no row changes its device."""

    def cut(x: jax.Array) -> jax.Array:
        count = config.schedule.num_microbatches
        return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)

    return {name: cut(array) for name, array in batch.items()}
