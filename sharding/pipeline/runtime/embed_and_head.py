"""Runs the embedding before the first layer and the head after the last.

Either one stage runs them alone, or, with `pipeline.share_vocab`, all stages run them together,
each with its part of the vocabulary. In that case all stages take part in the same tick, whatever
else they do in it: the activations are broadcast from the stage that has them to all, and results
that all stages compute identically are counted once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sharding.collectives import psum
from sharding.pipeline.runtime.packed_activations import PackedActivations
from sharding.pipeline.runtime.trees import add, where, zeros

Tree = Any


class EmbedAndHead:
    """The embedding and head of a model, as seen by one device.

    Args:
        model: provides `embed`, `head` and `teach`.
        packed: converts activations to and from the form in which they are sent.
        taken: type of the head's input, a tree of ShapeDtypeStructs.
        params: the non-stack parameters. Parameters marked by `is_split` are this stage's part
            only.
        stage: int32[], this device's stage.
        is_split: for each parameter, whether it is split over the stages.
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
        self._model = model
        self._packed = packed
        self._taken = taken
        self.params = params
        self._stage = stage
        self._is_split = is_split

    def embed(self, microbatch: Tree) -> Tree:
        """Return the activations that enter the first layer, packed."""
        return self._embed(self.params, microbatch)

    def embed_gradient(self, dx: Tree, microbatch: Tree) -> Tree:
        """Return the embedding's gradients of the non-stack parameters."""
        _, vjp = jax.vjp(lambda params: self._embed(params, microbatch), self.params)
        return vjp(dx)[0]

    def sums(self, x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
        """Return the head's `loss`, `weight` and metrics, summed over the microbatch."""
        return self._sums(self.params, x, microbatch)

    def teacher_outputs(self, x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
        """Return the outputs of the model's `teach`, which runs in place of the head."""
        return self._model.teach(self.params, self._packed.unpack(x, self._taken), microbatch)

    def head_gradient(self, x: Tree, microbatch: Tree) -> tuple[dict, Tree, Tree]:
        """Return (sums, gradients of the non-stack parameters, gradient of x)."""

        def loss(params, x):
            sums = self._sums(params, x, microbatch)
            return sums["loss"], sums

        (params, dx), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(self.params, x)
        return sums, params, dx

    def of(self, stage: int, x: Tree) -> Tree:
        """Broadcast `x` from one stage to all stages."""
        return psum(self.only_on(stage, x, zeros(x)), ("pipeline",))

    def only_on(self, stage: int, then: Tree, otherwise: Tree) -> Tree:
        """Return `then` on the given stage, and `otherwise` on all others."""
        return where(self._stage == stage, then, otherwise)

    def add_together(self, stage: int, total: Tree, gradients: Tree) -> Tree:
        """Add gradients that all stages have computed together to `total`.

        Every stage adds its part of split parameters. Gradients of replicated parameters are
        identical on all stages, so only one stage adds them: they are summed over `pipeline` at the
        end of the step.
        """
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
