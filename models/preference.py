"""Direct preference optimization (DPO): learns which of two answers is the better one.

A row has pairs of texts, and each text ends with an answer. A pair's loss compares how much more
likely its chosen answer became than its rejected one, since the run began:

    x [B, T, D] ──> log-probability of each token [B, T]
                      ──> of each answer [B, P, 2] ── minus the reference's ──> rewards
                            ──> loss of each pair [B, P] ──> one sum

The *reference* is the model before the first step. Its log-probabilities are constants, which come
with the batch. The *reward* of an answer is `beta` × the difference of its log-probabilities.

B batch, T seq, D embed, V vocab, P most pairs in a row.

Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7. With `label_smoothing`: conservative
DPO, Mitchell 2023 (https://ericmitchell.ai/cdpo.pdf), equation 3.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fields.field import field
from fields.section import Section
from models.functions import ModelFunctions
from models.layers.flops import declare_flops
from models.losses import VocabLogits
from sharding.ops.sequence import counted_once, sum_over_tokens

Tree = Any

#: The key of a batch that holds the log-probabilities of the reference.
REFERENCE_LOG_PROBS = "reference_log_probs"
#: Names of the metrics of `preference_loss`, in addition to the loss.
METRICS = ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceConfig(Section, section="preference"):
    """The loss of `data.objective=preference`: direct preference optimization."""

    beta: float = field(
        0.1, "How much the model loses by moving away from the one it began as.", gt=0
    )
    label_smoothing: float = field(
        0.0,
        "Assumed probability that the two answers of a pair are swapped.",
        ge=0,
        lt=0.5,
        remedy="choose for example 0.1",
    )


def with_preference(
    functions: ModelFunctions, model: Any, config: PreferenceConfig
) -> ModelFunctions:
    """Return a model's functions with the loss of preferences, and with the reference.

    Args:
        functions: model's functions.
        model: model, which may be abstract.
        config: loss.

    Raises:
        ValueError: the model has no `outputs`, or another token loss.
    """
    outputs = functions.outputs
    if outputs is None:
        raise ValueError(
            f"data.objective='preference': {type(model).__name__} has no method 'outputs'; "
            "models/stack.py describes it"
        )
    if (loss := getattr(model.config, "loss", "cross_entropy")) != "cross_entropy":
        raise ValueError(
            f"model.loss={loss!r} is not used with data.objective='preference', which compares "
            "log-probabilities; set model.loss='cross_entropy'"
        )

    def head(non_stack_params: Tree, x: Tree, batch: Tree) -> tuple[jax.Array, jax.Array, dict]:
        return preference_loss(outputs(non_stack_params, x), batch, config=config)

    def reference(non_stack_params: Tree, x: Tree, batch: Tree) -> dict[str, jax.Array]:
        return {REFERENCE_LOG_PROBS: answer_log_probs(outputs(non_stack_params, x), batch)}

    return dataclasses.replace(functions, head=head, reference=reference)


def answer_log_probs(logits: VocabLogits, batch: dict) -> jax.Array:
    """Return the log-probability of each answer, float32[B, P, 2] or wider, without a gradient.

    Args:
        logits: logits of all tokens.
        batch: has `targets: int32[B, T]`; `answers: int32[B, T]`, the number of the answer that the
            target belongs to, or 0; and `weights: float32[B, P]`. Pair p has the answers 2p + 1,
            which is chosen, and 2p + 2.
    """
    losses_BT = logits.token_losses(batch["targets"])
    num_pairs = batch["weights"].shape[1]
    numbers = 1 + jnp.arange(2 * num_pairs, dtype=batch["answers"].dtype)
    is_in_BTA = batch["answers"][..., None] == numbers
    sums_BA = sum_over_tokens(jnp.sum(jnp.where(is_in_BTA, -losses_BT[..., None], 0), axis=1))
    return sums_BA.reshape(len(sums_BA), num_pairs, 2)


def preference_loss(
    logits: VocabLogits, batch: dict, *, config: PreferenceConfig
) -> tuple[jax.Array, jax.Array, dict]:
    """Return (sum of the weighted losses of pairs, sum of weights, sums of the METRICS).

    Args:
        logits: as for `answer_log_probs`.
        batch: as for `answer_log_probs`, with `reference_log_probs: float32[B, P, 2]`.
        config: loss.
    """
    # Not counted: the same product as in the sum of token losses below.
    log_probs = declare_flops(0, answer_log_probs, logits, batch)
    rewards = config.beta * (log_probs - batch[REFERENCE_LOG_PROBS])
    margins_BP = rewards[..., 0] - rewards[..., 1]
    weights_BP = batch["weights"].astype(margins_BP.dtype)
    swapped = config.label_smoothing
    losses_BP = -(1 - swapped) * jax.nn.log_sigmoid(margins_BP)
    losses_BP -= swapped * jax.nn.log_sigmoid(-margins_BP)
    once_BP = counted_once(weights_BP)
    total = jnp.sum(losses_BP * once_BP)

    # A loss depends on all tokens of its pair, so it is not a sum over chunks of tokens. But its
    # gradient is: it equals the gradient of the sum of the token losses, each weighted by the
    # derivative of its pair's loss.
    slopes_BP = swapped - jax.nn.sigmoid(-margins_BP)
    factors_BP = config.beta * weights_BP * slopes_BP
    per_answer_BA = jnp.stack([-factors_BP, factors_BP], axis=-1).reshape(len(factors_BP), -1)
    no_answer = jnp.zeros_like(per_answer_BA[:, :1])
    token_weights_BT = jnp.take_along_axis(
        jnp.concatenate([no_answer, per_answer_BA], axis=1), batch["answers"], axis=1
    )
    with_gradient = logits.loss(batch["targets"], token_weights_BT)
    total += with_gradient - jax.lax.stop_gradient(with_gradient)

    metrics = (margins_BP > 0, margins_BP, rewards[..., 0], rewards[..., 1])
    sums = [jnp.sum(values_BP * once_BP) for values_BP in metrics]
    return total, jnp.sum(once_BP), dict(zip(METRICS, sums, strict=True))
