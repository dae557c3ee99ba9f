"""A corpus, a token loss and an optimizer of one's own, named by import path in a config:

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
from train.optim.optimizer import OptimizerConfig


def poems() -> dict[str, list[str]]:
    """Returns the documents of each split."""
    zen = codecs.decode(this.s, "rot13").splitlines()
    return {"train": zen * 20, "validation": zen[:5]}


def z_loss(logits_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    """Returns cross-entropy plus a pull of the softmax's normaliser to 1, as PaLM was trained."""
    log_z_C = jax.nn.logsumexp(logits_CV, axis=1)
    return cross_entropy(logits_CV, targets_C) + 1e-4 * jnp.square(log_z_C)


def sgd(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns SGD with Nesterov momentum; clipping is put before it."""
    return optax.sgd(schedule, momentum=config.beta1, nesterov=True)
