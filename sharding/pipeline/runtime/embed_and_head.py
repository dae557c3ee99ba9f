"""Embedding and head: what runs before the first layer and after the last.

A stage runs them alone, or all stages run them together, each with its part of the vocab. Then all
take part in the same tick, whatever else they do in it: what one stage has is sent to all, and what
all have computed counts once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sharding.collectives import psum
from sharding.pipeline.runtime.packed_activations import PackedActivations
from sharding.pipeline.runtime.trees import add, where, zeros

Tree = Any


class EmbedAndHead:
    """One device's view of them.

    Args:
      model: its `embed`, `head` and `teach` are called.
      parcels: the form in which x comes and goes.
      taken: type of what the head takes: ShapeDtypeStructs.
      params: its parameters outside the stacks; those that `is_split` marks are this stage's part.
      stage: int32[], this device's.
      is_split: a bool per parameter.
    """

    def __init__(
        self,
        model: Any,
        packed: PackedActivations,
        taken: Tree,
        params: Tree,
        stage: jax.Array,
        is_split: Tree,
    ):
        self._model, self._packed, self._taken = model, packed, taken
        self.params, self._stage, self._is_split = params, stage, is_split

    def embed(self, microbatch: Tree) -> Tree:
        """Returns the activations that enter the first layer."""
        return self._embed(self.params, microbatch)

    def embed_gradient(self, dx: Tree, microbatch: Tree) -> Tree:
        """Returns the gradients of the parameters."""
        _, vjp = jax.vjp(lambda params: self._embed(params, microbatch), self.params)
        return vjp(dx)[0]

    def sums(self, x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
        """Returns the head's `loss`, `weight` and metrics."""
        return self._sums(self.params, x, microbatch)

    def teacher_outputs(self, x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
        """Returns what the model's `teach` gives in place of the head."""
        return self._model.teach(self.params, self._packed.unpack(x, self._taken), microbatch)

    def head_gradient(self, x: Tree, microbatch: Tree) -> tuple[dict, Tree, Tree]:
        """Returns (sums, gradients of the parameters, gradient of x)."""

        def loss(params, x):
            sums = self._sums(params, x, microbatch)
            return sums["loss"], sums

        (params, dx), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(self.params, x)
        return sums, params, dx

    def of(self, stage: int, x: Tree) -> Tree:
        """Returns, on every stage, what `stage` has."""
        return psum(self.only_on(stage, x, zeros(x)), ("pipeline",))

    def only_on(self, stage: int, then: Tree, otherwise: Tree) -> Tree:
        """Returns `then` on that stage, and `otherwise` on the others."""
        return where(self._stage == stage, then, otherwise)

    def add_together(self, stage: int, total: Tree, gradients: Tree) -> Tree:
        """Returns `total` with gradients that all stages have: of whole parameters on one stage."""
        once = self.only_on(stage, gradients, zeros(gradients))
        counted = jax.tree.map(
            lambda split, part, whole: part if split else whole, self._is_split, gradients, once
        )
        return add(total, counted)

    def _embed(self, params: Tree, microbatch: Tree) -> Tree:
        return self._packed.pack(self._model.embed(params, microbatch))

    def _sums(self, params: Tree, x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
        x = self._packed.unpack(x, self._taken)
        loss, weight, metrics = self._model.head(params, x, microbatch)
        return jax.tree.map(jnp.asarray, {"loss": loss, "weight": weight, **metrics})
