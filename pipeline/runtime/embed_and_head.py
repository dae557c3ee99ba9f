"""Runs the embedding before the first layer and the head after the last, in one of two ways.

- `OnOneStage`: the first stage embeds as a part of its forwards and backwards, and the last stage
  runs the head as a part of its own.
- `OnAllStages`, with `pipeline.share_vocab`: all stages embed and run the head together, each with
  its part of the vocabulary, in addition to their other work in that tick. The stage that has the
  activations broadcasts them, and results that all stages compute identically are counted once.

A stage (stage.py) calls the methods of either class at the same places of every tick:

    method                       when                      OnOneStage          OnAllStages
    embed_ahead                  before all else           -                   embedding
    chunk_input                  in F; in B if recomputed  embedding           -
    head_ahead                   between F and B           -                   head, its gradient
    loss_and_output_cotangent    in B                      head, its gradient  -
    add_embed_gradient           in B                      embedding gradient  -
    embed_gradient_after         between B and W           -                   embedding gradient
    collect                      after F, in evaluations   head                head

"Head" includes the loss, which is added to the sums.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.runtime.packed_activations import PackedActivations
from pipeline.runtime.pipeline_functions import PipelineFunctions
from pipeline.runtime.tick_table import ChunkOperation, TickTable
from pipeline.runtime.trees import add, read, total_of, where, wide_types, without, write, zeros
from sharding.collectives import psum
from sharding.logical import on_whole_tokens
from sharding.ops.update_if import update_if

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadState:
    """What the head reads and updates.

    Attributes:
        sums: sums of losses, weights and metrics so far.
        non_stack_grads: gradients of the non-stack parameters so far.
        dy: gradient of the output of a chunk; of the model's last chunk, the head computes it.
    """

    sums: dict[str, Tree]
    non_stack_grads: Tree
    dy: Tree | None


class EmbedAndHead:
    """The embedding and head of a model on packed activations.

    Args:
        functions: provide `embed`, `head` and `teach`.
        packed: packs activations for sending, and unpacks them.
        head_input_type: type of the head's input, a tree of ShapeDtypeStructs.
        non_stack_params: parameters outside the stacks; of those that are split over stages,
            this stage's part.
    """

    def __init__(
        self,
        functions: PipelineFunctions,
        packed: PackedActivations,
        head_input_type: Tree,
        non_stack_params: Tree,
    ):
        self._functions = functions
        self._packed = packed
        self._head_input_type = head_input_type
        self._non_stack_params = non_stack_params

    def embed(self, microbatch: Tree) -> Tree:
        """Return the activations that enter the first layer, packed."""
        return self._embed(self._non_stack_params, microbatch)

    def embed_gradient(self, dx: Tree, microbatch: Tree) -> Tree:
        """Return the embedding's gradients of the non-stack parameters."""

        def embed(non_stack_params):
            return self._embed(non_stack_params, microbatch)

        _, vjp = jax.vjp(embed, self._non_stack_params)
        (non_stack_grads,) = vjp(dx)
        return non_stack_grads

    def sums(self, x: Tree, microbatch: Tree) -> dict[str, Tree]:
        """Return the head's `loss`, `weight` and metrics, summed over the microbatch."""
        return self._sums(self._non_stack_params, x, microbatch)

    def teacher_outputs(self, x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
        """Return the outputs of the model's `teach`, which runs in place of the head."""
        teach = self._functions.teach
        assert teach is not None
        x = self._packed.unpack(x, self._head_input_type)
        return on_whole_tokens(lambda x: teach(self._non_stack_params, x, microbatch), x)

    def head_gradient(self, x: Tree, microbatch: Tree) -> tuple[dict, Tree, Tree]:
        """Return (sums, gradients of the non-stack parameters, gradient of x)."""

        def loss(non_stack_params, x):
            sums = self._sums(non_stack_params, x, microbatch)
            return total_of(sums["loss"]), sums

        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (non_stack_grads, dx), sums = grad(self._non_stack_params, x)
        return sums, non_stack_grads, dx

    def zero_non_stack_gradients(self) -> Tree:
        """Return zero gradients of the non-stack parameters; None for frozen ones."""
        frozen = self._functions.frozen
        marks = None if frozen is None else frozen["non_stack"]
        return zeros(without(wide_types(self._non_stack_params), marks))

    # What a class below leaves out does nothing.

    def embed_ahead(self, inputs: Tree, tick: TickTable) -> Tree:
        """Return the buffer of inputs, into which an embedding may have been written."""
        return inputs

    def chunk_input(self, operation: ChunkOperation, x: Tree | None, microbatch: Tree) -> Tree:
        """Return the input of a chunk; `x` arrived, or is in the buffer of inputs."""
        return x

    def head_ahead(
        self, sums: Tree, non_stack_grads: Tree, head_inputs: Tree, tick: TickTable
    ) -> HeadState:
        """Return the state after the head; `dy` is None if it did not run."""
        return HeadState(sums=sums, non_stack_grads=non_stack_grads, dy=None)

    def add_embed_gradient(
        self, operation: ChunkOperation, non_stack_grads: Tree, dx: Tree, microbatch: Tree
    ) -> Tree:
        """Return the gradients of non-stack parameters, in a backward whose result is `dx`."""
        return non_stack_grads

    def embed_gradient_after(self, non_stack_grads: Tree, dx: Tree, tick: TickTable) -> Tree:
        """Return the gradients of non-stack parameters, after a backward whose result is `dx`."""
        return non_stack_grads

    def _embed(self, non_stack_params: Tree, microbatch: Tree) -> Tree:
        x = on_whole_tokens(lambda: self._functions.embed(non_stack_params, microbatch))
        return self._packed.pack(x)

    def _sums(self, non_stack_params: Tree, x: Tree, microbatch: Tree) -> dict[str, Tree]:
        x = self._packed.unpack(x, self._head_input_type)
        loss, weight, metrics = on_whole_tokens(
            lambda x: self._functions.head(non_stack_params, x, microbatch), x
        )
        return jax.tree.map(jnp.asarray, {"loss": loss, "weight": weight, **metrics})


class OnOneStage(EmbedAndHead):
    """The first stage embeds, and the last stage runs the head."""

    def chunk_input(self, operation: ChunkOperation, x: Tree | None, microbatch: Tree) -> Tree:
        """Return a chunk's input: the embedding on the first chunk, else `x`, which arrived."""

        def embedded(x: Tree) -> Tree:
            return self.embed(microbatch)

        return update_if(operation.on_first_chunk, embedded, x)

    def loss_and_output_cotangent(
        self,
        operation: ChunkOperation,
        state: HeadState,
        dy_from_head: Tree,
        y: Tree,
        microbatch: Tree,
    ) -> HeadState:
        """Return the state before the backward of a chunk.

        Args:
            operation: backward.
            state: its `dy` is the cotangent that the next chunk sent; None if no chunk sends one.
            dy_from_head: `dy` of the result of `head_ahead`.
            y: output of the chunk; None if it is not the last one.
            microbatch: microbatch of the operation.
        """

        def run_head(state: HeadState) -> HeadState:
            sums, grads, dy = self.head_gradient(y, microbatch)
            return HeadState(
                sums=add(state.sums, sums),
                non_stack_grads=add(state.non_stack_grads, grads),
                dy=dy,
            )

        return update_if(operation.on_last_chunk, run_head, state)

    def add_embed_gradient(
        self, operation: ChunkOperation, non_stack_grads: Tree, dx: Tree, microbatch: Tree
    ) -> Tree:
        """Return the gradients of non-stack parameters; the first chunk adds the embedding's."""

        def embedded(non_stack_grads: Tree) -> Tree:
            return add(non_stack_grads, self.embed_gradient(dx, microbatch))

        return update_if(operation.on_first_chunk, embedded, non_stack_grads)

    def collect(self, include: Callable, result: Tree, y: Tree, tick: TickTable) -> Tree:
        """Add the result of the last chunk's forward: `include(result, y, microbatch)`."""

        def more(result: Tree) -> Tree:
            return include(result, y, tick.forward.microbatch)

        return update_if(tick.forward.on_last_chunk, more, result)


class OnAllStages(EmbedAndHead):
    """All stages embed and run the head together, each with its part of the vocabulary.

    Args:
        stage_index: int32[], this device's stage.
        first: stage that has the model's first chunk.
        last: stage that has the model's last chunk.
        is_split: for each non-stack parameter, whether it is split over the stages.
        microbatches: arrays `[M, B, ...]`.
        *args: arguments of `EmbedAndHead`.
    """

    def __init__(
        self,
        stage_index: jax.Array,
        first: int,
        last: int,
        is_split: Tree,
        microbatches: Tree,
        *args: Any,
    ):
        super().__init__(*args)
        self._microbatches = microbatches
        self._stage_index = stage_index
        self._first = first
        self._last = last
        self._is_split = is_split

    def embed_ahead(self, inputs: Tree, tick: TickTable) -> Tree:
        """Embed a microbatch; the first stage writes it to its buffer of inputs."""

        def embed(inputs: Tree) -> Tree:
            x = self.embed(read(self._microbatches, tick.embed.microbatch))
            written = write(inputs, tick.forward.slots.input, x)
            return self._only_on(self._first, written, inputs)

        return update_if(tick.embed.runs, embed, inputs)

    def head_ahead(
        self, sums: Tree, non_stack_grads: Tree, head_inputs: Tree, tick: TickTable
    ) -> HeadState:
        """Run the head and its gradient; return the state after it."""

        def run_head(state: HeadState) -> HeadState:
            y = self._broadcast(self._last, read(head_inputs, tick.backward.slots.head_input))
            microbatch = read(self._microbatches, tick.head.microbatch)
            sums, grads, dy = self.head_gradient(y, microbatch)
            return HeadState(
                sums=self._only_on(self._last, add(state.sums, sums), state.sums),
                non_stack_grads=self._add_once(self._last, state.non_stack_grads, grads),
                dy=dy,
            )

        state = HeadState(sums=sums, non_stack_grads=non_stack_grads, dy=zeros(self._packed.type))
        return update_if(tick.head.runs, run_head, state)

    def loss_and_output_cotangent(
        self,
        operation: ChunkOperation,
        state: HeadState,
        dy_from_head: Tree,
        y: Tree,
        microbatch: Tree,
    ) -> HeadState:
        """Return the state before the backward of a chunk; see `OnOneStage`."""
        dy = update_if(operation.on_last_chunk, lambda dy: dy_from_head, state.dy)
        return dataclasses.replace(state, dy=dy)

    def embed_gradient_after(self, non_stack_grads: Tree, dx: Tree, tick: TickTable) -> Tree:
        """Add the embedding's gradients, from the first chunk's input gradient."""

        def embed(non_stack_grads: Tree) -> Tree:
            microbatch = read(self._microbatches, tick.embed_gradient.microbatch)
            grads = self.embed_gradient(self._broadcast(self._first, dx), microbatch)
            return self._add_once(self._first, non_stack_grads, grads)

        return update_if(tick.embed_gradient.runs, embed, non_stack_grads)

    def collect(self, include: Callable, result: Tree, y: Tree, tick: TickTable) -> Tree:
        """Add the result of the last chunk's forward, on the last stage; all run the head."""

        def together(result: Tree) -> Tree:
            more = include(result, self._broadcast(self._last, y), tick.head.microbatch)
            return self._only_on(self._last, more, result)

        return update_if(tick.head.runs, together, result)

    def _broadcast(self, stage: int, x: Tree) -> Tree:
        """Broadcast `x` from one stage to all stages."""
        return psum(self._only_on(stage, x, zeros(x)), ("pipeline",))

    def _only_on(self, stage: int, then: Tree, otherwise: Tree) -> Tree:
        """Return `then` on the given stage, and `otherwise` on all others."""
        return where(self._stage_index == stage, then, otherwise)

    def _add_once(self, stage: int, total: Tree, grads: Tree) -> Tree:
        """Add `grads`, gradients that all stages have computed together to `total`.

        Every stage adds its part of split parameters. Gradients of replicated parameters are
        identical on all stages, so only one stage adds them: they are summed over `pipeline` at the
        end of the step.
        """
        once = self._only_on(stage, grads, zeros(grads))
        counted = jax.tree.map(
            lambda split, part, whole: part if split else whole, self._is_split, grads, once
        )
        return add(total, counted)
