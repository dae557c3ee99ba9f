"""Parameters of a model with one stack, for tests of optimizers without a model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.optim.config import OptimizerConfig

BASE = OptimizerConfig(
    name="adamw",
    learning_rate=0.02,
    warmup_steps=4,
    schedule="cosine",
    final_learning_rate_fraction=0.1,
    weight_decay=0.1,
    clip_norm=1.0,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
)

#: A stack with three slots, of which the last is padding, and an embedding table.
STACKS = ("blocks",)
SLOTS = {"kernel": (3, 5, 4), "bias": (3, 4), "gain": (3, 4)}
#: Tensors of these names are vectors: they have no decay and a trust ratio of 1.
VECTORS = ("bias", "gain")


def stacked(rng: np.random.Generator) -> dict[str, Any]:
    """Return a tree like the parameters of a model with one stack, whose last slot is zeros."""
    slots = {name: rng.normal(size=shape) for name, shape in SLOTS.items()}
    for array in slots.values():
        array[-1] = 0
    return {"blocks": {"layers": slots}, "table": rng.normal(size=(6, 4))}


def tensors(tree: Any) -> dict[str, np.ndarray]:
    """Split such a tree into its tensors: one per slot, and the table."""
    slots = tree["blocks"]["layers"]
    in_slots = {f"{name}{i}": slots[name][i] for name in slots for i in range(len(slots[name]))}
    return {
        name: np.array(tensor) for name, tensor in (*in_slots.items(), ("table", tree["table"]))
    }


class Trained(NamedTuple):
    """Parameters and optimizer state after some steps, and those of a reference."""

    params: Any
    state: Any
    theirs: Any
    their_state: Any


def train_beside(
    optimizer: optax.GradientTransformation,
    reference: optax.GradientTransformation,
    params: Any,
    draw: Callable[[], Any],
    num_steps: int,
) -> Trained:
    """Train stacked parameters, and their tensors with a reference, on the same gradients.

    Args:
        params: tree like that of `stacked`.
        draw: returns the next gradients, as a tree like `params`.
    """
    theirs: Any = jax.tree.map(jnp.asarray, tensors(params))
    state = optimizer.init(params)
    their_state = reference.init(theirs)
    for _ in range(num_steps):
        grads = draw()
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        their_grads = jax.tree.map(jnp.asarray, tensors(grads))
        their_updates, their_state = jax.jit(reference.update)(their_grads, their_state, theirs)
        theirs = optax.apply_updates(theirs, their_updates)
    return Trained(params, state, theirs, their_state)
