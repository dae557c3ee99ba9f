"""One device's stage in training: the state between two ticks, and the tick.

executor.py draws a tick. Between two ticks everything that waits is in the carry of the loop:

    carry      y                           output of the last forward, on its way
               inputs, cotangents          buffers that other stages' values arrive in
               residuals, head_inputs      buffers that this stage's operations fill
               sums                        of losses, weights and metrics so far
               non_stack_grads             sums of gradients so far, outside all stacks
               stacks_grads                sums of gradients so far, of each stack
    tick  which microbatch and chunk to work on, and which slots to read and write
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.runtime.chunks import BackwardState, ChunkResiduals
from pipeline.runtime.embed_and_head import HeadState
from pipeline.runtime.stage import Stage, read_or_none
from pipeline.runtime.tick_table import Channel, ChunkOperation, TickTable
from pipeline.runtime.trees import read, write, zeros
from pipeline.schedules.table import BACKWARD, FORWARD
from sharding.labels import counted_as
from sharding.ops.update_if import update_if

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCarry:
    """The state of a stage between two ticks.

    Buffers of activations are `[slots, ...]`, with one more slot for arrivals that nobody reads, or
    None if the schedule has no such buffer.

    Attributes:
        num_backwards: int32[], number of backwards so far.
        sums: sums of losses, weights and metrics so far.
        non_stack_grads: sums of the gradients of non-stack parameters so far.
        stacks_grads: stack -> sums of the gradients of its parameters so far.
        residuals: stack -> buffers for the residuals that backwards read.
        y: output of the last forward, which has not been sent yet; None with a single stage.
        inputs: chunk inputs that have arrived.
        cotangents: gradients of chunk outputs that have arrived; None if no stack has a backward.
        head_inputs: outputs of the model's last chunk.
    """

    num_backwards: jax.Array
    sums: dict[str, Tree]
    non_stack_grads: Tree
    stacks_grads: dict[str, Tree]
    residuals: ChunkResiduals
    y: Tree | None
    inputs: Tree | None
    cotangents: Tree | None
    head_inputs: Tree | None


class TrainingStage(Stage):
    """A stage that runs forwards, backwards and weight gradients."""

    @property
    def tick(self) -> Callable[[TrainingCarry, TickTable], tuple[TrainingCarry, None]]:
        """The function that runs one tick: the body of the loop over `column`."""
        return self._skewed_tick if self._program.is_skewed else self._plain_tick

    def first_carry(self) -> TrainingCarry:
        """Return the state before the first tick; frozen parameters have None as gradients."""
        program = self._program
        non_stack_grads = self._embed_and_head.zero_non_stack_gradients()
        return TrainingCarry(
            num_backwards=jnp.int32(0),
            sums=zeros(self._sums_type),
            non_stack_grads=counted_as("gradients", non_stack_grads),
            stacks_grads=counted_as("gradients", self._chunks.zero_stacks_gradients()),
            residuals=self._chunks.empty_chunk_residuals(program.num_slots),
            y=zeros(self._x_type) if program.is_skewed else None,
            inputs=self._buffer("input"),
            cotangents=self._buffer("cotangent") if self._chunks.has_backward else None,
            head_inputs=self._buffer("head_input"),
        )

    def column(self) -> TickTable:
        """Return this stage's work in all ticks."""
        return self._program.iterations.column(self._stage_index)

    def _plain_tick(self, carry: TrainingCarry, tick: TickTable) -> tuple[TrainingCarry, None]:
        """Run one tick; the order of the code is the order of the phases."""
        y, carry = self._forward_phase(carry, zeros(self._x_type), tick)
        sent = self._send(FORWARD, y)
        dx, carry = self._backward_phase(carry, tick)
        inputs = self._receive(FORWARD, carry.inputs, sent, tick)
        sent = self._send_cotangent(dx)
        cotangents = self._receive(BACKWARD, carry.cotangents, sent, tick)
        return dataclasses.replace(carry, inputs=inputs, cotangents=cotangents), None

    def _skewed_tick(self, carry: TrainingCarry, tick: TickTable) -> tuple[TrainingCarry, None]:
        """Run the backwards of one tick and then the forwards of the next (`TickTable.skewed`).

        The barriers keep arrivals behind the work that hides them. XLA's scheduler would write them
        to their buffers as soon as possible.
        """
        sent = self._send(FORWARD, carry.y)
        dx, carry = self._backward_phase(carry, tick)
        dx, inputs = jax.lax.optimization_barrier((dx, carry.inputs))
        inputs = self._receive(FORWARD, inputs, sent, tick)
        carry = dataclasses.replace(carry, inputs=inputs)
        sent = self._send_cotangent(dx)
        # The forward depends on the backward. XLA would otherwise copy the residual buffers,
        # because the one might write to them before the other has read them.
        microbatch = jnp.where(carry.num_backwards >= 0, tick.forward.microbatch, -1)
        forward = dataclasses.replace(tick.forward, microbatch=microbatch)
        tick = dataclasses.replace(tick, forward=forward)
        y, carry = self._forward_phase(carry, carry.y, tick)
        y, cotangents = jax.lax.optimization_barrier((y, carry.cotangents))
        cotangents = self._receive(BACKWARD, cotangents, sent, tick)
        return dataclasses.replace(carry, y=y, cotangents=cotangents), None

    def _forward_phase(
        self, carry: TrainingCarry, y: Tree, tick: TickTable
    ) -> tuple[Tree, TrainingCarry]:
        """Run embedding and forward; return (output of the forward, or `y` without one, carry)."""
        inputs = self._embed_and_head.embed_ahead(carry.inputs, tick)
        carry = dataclasses.replace(carry, inputs=inputs)
        # A table may have no forward of its own: the only virtual stage folds it into its backward.
        if tick.forward.always is False:
            return y, carry
        # Read ahead of the loop that runs the forward at most once, so that it does not read the
        # whole buffer.
        x = read_or_none(carry.inputs, tick.forward.slots.input)
        run_forward = partial(self._run_forward, tick.forward, x)
        return update_if(tick.forward.runs, run_forward, (y, carry))

    def _backward_phase(self, carry: TrainingCarry, tick: TickTable) -> tuple[Tree, TrainingCarry]:
        """Run head, backward and weight gradient; return (gradient of the input, carry)."""
        embed_and_head = self._embed_and_head
        x = read_or_none(carry.inputs, tick.backward.slots.input)
        dy = read_or_none(carry.cotangents, tick.backward.slots.cotangent)
        if not self._chunks.has_backward:
            dy = zeros(self._x_type)
        head = embed_and_head.head_ahead(carry.sums, carry.non_stack_grads, carry.head_inputs, tick)
        carry = dataclasses.replace(carry, sums=head.sums, non_stack_grads=head.non_stack_grads)
        run_backward = partial(self._run_backward, tick.backward, x, dy, head.dy)
        dx, carry = update_if(tick.backward.runs, run_backward, (zeros(self._x_type), carry))
        non_stack_grads = embed_and_head.embed_gradient_after(carry.non_stack_grads, dx, tick)
        carry = dataclasses.replace(carry, non_stack_grads=non_stack_grads)
        # Without split backwards there are no weight gradients.
        if tick.weight_gradient.always is not False:
            operation = tick.weight_gradient
            run_weight_gradient = partial(self._run_weight_gradient, operation)
            carry = update_if(operation.runs, run_weight_gradient, carry)
        return dx, carry

    def _send_cotangent(self, dx: Tree) -> dict[Channel, Tree]:
        """Send the gradient of a chunk's input, unless no stack has a backward."""
        return self._send(BACKWARD, dx) if self._chunks.has_backward else {}

    def _run_forward(
        self, operation: ChunkOperation, x: Tree, state: tuple[Tree, TrainingCarry]
    ) -> tuple[Tree, TrainingCarry]:
        """Run a chunk's forward; the residuals are not kept if the backward recomputes them.

        Args:
            x: chunk's input, if it arrived from another chunk.
            state: (output of the last forward, carry).

        Returns:
            (output, carry).
        """
        carry = state[1]
        work = self._work(operation)
        x = self._embed_and_head.chunk_input(operation, x, work.microbatch)
        residuals = carry.residuals
        if self._program.recomputes:
            y = self._chunks.chunk_forward(work, x)
        else:
            y, residuals = self._chunks.chunk_forward_saving(work, x, residuals)
        head_inputs = carry.head_inputs
        if head_inputs is not None:
            head_inputs = update_if(
                operation.on_last_chunk,
                lambda buffer: write(buffer, work.slots.head_input, y),
                head_inputs,
            )
        return y, dataclasses.replace(carry, residuals=residuals, head_inputs=head_inputs)

    def _run_backward(
        self,
        operation: ChunkOperation,
        x: Tree,
        dy: Tree,
        dy_from_head: Tree,
        state: tuple[Tree, TrainingCarry],
    ) -> tuple[Tree, TrainingCarry]:
        """Run a chunk's backward.

        Args:
            operation: backward, or the input gradient.
            x: chunk's input, if it arrived from another chunk.
            dy: gradient of the chunk's output, if it arrived from another chunk.
            dy_from_head: gradient of the head's input, if all stages have just computed it.
            state: (zeros like the result, carry).

        Returns:
            (gradient of the chunk's input, the carry with new totals and residuals).
        """
        carry = state[1]
        work = self._work(operation)
        residuals = carry.residuals
        y = None
        if self._program.recomputes:
            x = self._embed_and_head.chunk_input(operation, x, work.microbatch)
            residuals = self._with_scratch(residuals)
            slots = dataclasses.replace(work.slots, saved=jnp.int32(0))
            work = dataclasses.replace(work, slots=slots)
            y, residuals = self._chunks.chunk_forward_saving(work, x, residuals)
        if carry.head_inputs is not None:
            y = read(carry.head_inputs, work.slots.head_input)
        head = HeadState(sums=carry.sums, non_stack_grads=carry.non_stack_grads, dy=dy)
        head = self._embed_and_head.loss_and_output_cotangent(
            operation, head, dy_from_head, y, work.microbatch
        )
        backward = BackwardState(
            dy=head.dy,
            non_stack_grads=head.non_stack_grads,
            stack_grads=carry.stacks_grads,
            residuals=residuals,
        )
        backward = self._chunks.chunk_backward(work, backward)
        dx = backward.dy
        non_stack_grads = self._embed_and_head.add_embed_gradient(
            operation, backward.non_stack_grads, dx, work.microbatch
        )
        residuals = backward.residuals
        if self._program.recomputes:
            residuals = _without_scratch(residuals)
        return dx, dataclasses.replace(
            carry,
            num_backwards=carry.num_backwards + 1,
            sums=head.sums,
            non_stack_grads=non_stack_grads,
            stacks_grads=backward.stack_grads,
            residuals=residuals,
        )

    def _with_scratch(self, residuals: ChunkResiduals) -> ChunkResiduals:
        """Add buffers with one slot for residuals that only the current operation reads."""
        scratch = self._chunks.empty_chunk_residuals({"saved": 1})
        return {
            name: dataclasses.replace(
                stack_residuals,
                saved=scratch[name].saved,
                before_inputs=scratch[name].before_inputs,
            )
            for name, stack_residuals in residuals.items()
        }

    def _run_weight_gradient(
        self, operation: ChunkOperation, carry: TrainingCarry
    ) -> TrainingCarry:
        """Return the carry with the weight gradients of a chunk added."""
        stacks_grads = self._chunks.chunk_weight_gradient(
            self._work(operation), carry.residuals, carry.stacks_grads
        )
        return dataclasses.replace(carry, stacks_grads=stacks_grads)

    def reduce_gradients(self, carry: TrainingCarry) -> dict[str, Tree]:
        """Return `{"non_stack": ..., "stacks": {stack: ...}}`, the gradients of all devices.

        They are summed over all devices, and each is sharded like its parameter.
        """
        stacks_grads = self._chunks.stack_gradients(carry.stacks_grads)
        reduced = {
            "non_stack": self._non_stack_gatherer.reduced(carry.non_stack_grads),
            "stacks": {
                name: self._stack_gatherers[name].reduced(stack_grads)
                for name, stack_grads in stacks_grads.items()
            },
        }
        return counted_as("gradients", reduced)


def _without_scratch(residuals: ChunkResiduals) -> ChunkResiduals:
    """Remove the buffers that `TrainingStage._with_scratch` added."""
    return {
        name: dataclasses.replace(stack_residuals, saved=None, before_inputs=None)
        for name, stack_residuals in residuals.items()
    }
