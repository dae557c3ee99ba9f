"""Examples of your own corpus, token loss and optimizer.

A config selects them by import path:

    --config.data.name=docs.examples.own_parts:poems
    --config.model.loss=docs.examples.own_parts:z_loss
    --config.optimizer.name=docs.examples.own_parts:sgd
"""

import codecs
import this

import jax
import jax.numpy as jnp
import optax

from models.losses import cross_entropy
from train.optim.config import OptimizerConfig


def poems() -> dict[str, list[str]]:
    """Return the documents of each split."""
    zen = codecs.decode(this.s, "rot13").splitlines()
    return {"train": zen * 20, "validation": zen[:5]}


def z_loss(logits_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """Return cross-entropy plus z-loss, which keeps the softmax's normalizer close to 1.

    Args:
        logits_CV: float[C, V].
        targets_C: int32[C].

    Returns:
        The loss of each token, float[C].

    Source:
        Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), section 5.
    """
    log_z_C = jax.nn.logsumexp(logits_CV, axis=1)
    return cross_entropy(logits_CV, targets_C) + 1e-4 * jnp.square(log_z_C)


def sgd(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum; gradients are clipped before it.

    Args:
        config: config section `optimizer`; `beta1` is the momentum.
        schedule: learning rate by step.
    """
    return optax.sgd(schedule, momentum=config.beta1, nesterov=True)
