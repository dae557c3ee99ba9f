"""Detects spikes of the gradient norm, whose steps `train.skip_spikes` skips."""

import jax
import jax.numpy as jnp

from train.state.train_state import Spikes

#: Decay of the mean gradient norm per accepted step: it averages over about 100 steps.
SPIKE_MEAN_DECAY = 0.99
#: Number of norms in the mean before a step can count as a spike.
MIN_NORMS = 20
#: After this many spikes in a row, the next one counts as a new level: it is accepted, and the mean
#: starts again.
MAX_SPIKES = 10


def detect_spike(
    spikes: Spikes, norm: jax.Array, finite: jax.Array, skip_spikes: float
) -> tuple[jax.Array, Spikes]:
    """Decide whether a step is accepted, from its gradient norm.

    A norm above `skip_spikes` × the mean of accepted norms is a spike, and its step is not
    accepted. After MAX_SPIKES spikes in a row, the next norm counts as a new level: its step is
    accepted, and the mean starts again from it.

    Args:
        spikes: statistics before the step.
        norm: global gradient norm of the step.
        finite: bool[], whether loss and gradients are finite.
        skip_spikes: multiple of the mean norm.

    Returns:
        (accepted bool[], statistics after the step).
    """
    # The average starts at 0; dividing by 1 - decay^n removes this bias, as in Adam.
    mean = spikes.norm_mean / (1 - SPIKE_MEAN_DECAY ** jnp.maximum(spikes.num_norms, 1))
    is_high = finite & (spikes.num_norms >= MIN_NORMS) & (norm > skip_spikes * mean)
    is_spike = is_high & (spikes.num_in_a_row < MAX_SPIKES)
    accepted = finite & ~is_spike
    is_new_level = is_high & ~is_spike
    norm_mean = jnp.where(is_new_level, 0, spikes.norm_mean)
    norm_mean = SPIKE_MEAN_DECAY * norm_mean + (1 - SPIKE_MEAN_DECAY) * norm
    num_norms = jnp.where(is_new_level, 0, spikes.num_norms) + 1
    return accepted, Spikes(
        norm_mean=jnp.where(accepted, norm_mean, spikes.norm_mean),
        num_norms=jnp.where(accepted, num_norms, spikes.num_norms),
        num_in_a_row=jnp.where(accepted, 0, spikes.num_in_a_row + jnp.where(is_spike, 1, 0)),
    )
