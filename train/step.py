"""The training and the evaluation step: pure functions, jitted once."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.stack import Parts
from sharding.logical import Rules, axis_rules
from sharding.pipeline.config import PipelineConfig
from sharding.pipeline.executor import make_evaluate, make_loss_and_grad
from sharding.pipeline.layout import Layout
from sharding.pipeline.schedule import Schedule, forward_only
from sharding.zero import MemoryConfig
from train.state import Spikes, TrainState

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
    compute_dtype: str
    seed: int  # of dropout
    zero: MemoryConfig
    skip_spikes: float | None = None  # multiple of the mean gradient norm; None: of any size


def make_train_step(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    config: StepConfig,
    mesh: jax.sharding.Mesh,
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
    """
    loss_and_grad = make_loss_and_grad(
        parts,
        config.schedule,
        config.layouts,
        mesh,
        parts.split(specs),
        config.pipeline,
        config.zero,
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = _with_dropout_keys(_with_even_weights(batch), config.seed)
        microbatches = _to_microbatches(batch, config)
        with axis_rules(rules):
            params = parts.split(_cast(state.params, config.compute_dtype))
            sums, grads = loss_and_grad(params, microbatches)
        weight = sums.pop("weight")
        weight = jnp.where(weight > 0, weight, 1)
        grads = jax.tree.map(
            lambda g, p: (g / weight).astype(p.dtype), parts.join(grads), state.params
        )
        metrics = {name: value / weight for name, value in sums.items()}
        metrics["grad_norm"] = optax.tree.norm(grads)
        metrics["learning_rate"] = learning_rate(state.step - state.num_skipped)
        state = _update(state, grads, metrics, optimizer, config.skip_spikes)
        metrics["num_skipped"] = state.num_skipped
        metrics["num_nonfinite_in_a_row"] = state.num_nonfinite_in_a_row
        return state, metrics

    return train_step


def make_eval_step(
    parts: Parts,
    config: StepConfig,
    mesh: jax.sharding.Mesh,
    rules: Rules,
    specs: Tree,
) -> Callable[[Tree, Batch], dict[str, jax.Array]]:
    """Returns `eval_step(params, batch) -> sums`: `loss`, `weight` and the head's metrics."""
    schedule = config.schedule
    forwards = forward_only(
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_chunks,
        placement=schedule.placement,
    )
    evaluate = make_evaluate(
        parts, forwards, config.layouts, mesh, parts.split(specs), config.pipeline, config.zero
    )

    def eval_step(params: Tree, batch: Batch) -> dict[str, jax.Array]:
        with axis_rules(rules):
            params = parts.split(_cast(params, config.compute_dtype))
            return evaluate(params, _to_microbatches(_with_even_weights(batch), config))

    return eval_step


def _update(
    state: TrainState, grads: Tree, metrics: dict, optimizer, skip_spikes: float | None
) -> TrainState:
    finite = accepted = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    spikes = state.spikes
    if skip_spikes is not None:
        assert spikes is not None
        accepted, spikes = judge(spikes, metrics["grad_norm"], finite, skip_spikes)
    in_a_row = state.num_nonfinite_in_a_row + jnp.where(finite, 0, 1)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, old)

    return TrainState(
        step=state.step + 1,
        num_skipped=state.num_skipped + jnp.where(accepted, 0, 1),
        num_nonfinite_in_a_row=jnp.where(accepted, 0, in_a_row),
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
        spikes=spikes,
    )


def judge(
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


def _with_dropout_keys(batch: Batch, seed: int) -> Batch:
    """Returns the batch with a key per example, from the example's number alone."""
    # Folded twice, so that no key is one that an initial parameter was drawn from.
    base = jax.random.fold_in(jax.random.key(seed), _DROPOUT_TAG)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base, batch["index"])
    return {**batch, "dropout_keys": keys}


def _to_microbatches(batch: Batch, config: StepConfig) -> Batch:
    """Returns `[M, B/M, ...]`: row r goes to microbatch r mod M, so no row changes its device."""

    def cut(x: jax.Array) -> jax.Array:
        count = config.schedule.num_microbatches
        return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)

    return {name: cut(array) for name, array in batch.items()}


def _cast(params: Tree, dtype: str) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), params)
