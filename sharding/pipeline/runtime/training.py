"""One device's stage in training: the loop over ticks, and the tick.

executor.py draws a tick. Between two ticks everything that waits is in the carry of the loop:

    carry      inputs, cotangents          buffers that other stages' values arrive in
               residuals, head_inputs      buffers that this stage's operations fill
               sums, gradients             totals so far
    row        which microbatch and chunk to work on, and which slots to read and write
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sharding.estimate.labels import counted_as
from sharding.pipeline.runtime.buffers import Channel
from sharding.pipeline.runtime.chunks import ChunkResiduals
from sharding.pipeline.runtime.rows import TICKS, Operation, Row
from sharding.pipeline.runtime.stage import Stage, read_or_none
from sharding.pipeline.runtime.trees import read, wide, write, zeros
from sharding.pipeline.schedules.table import BACKWARD, FORWARD

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCarry:
    """What a stage keeps from one tick to the next.

    Buffers of activations are `[slots, ...]`, with one more slot for arrivals that nobody reads, or
    None if the schedule has no such buffer.

    Attributes:
        sums: sums of losses, weights and metrics so far.
        gradients: sums of gradients so far, `{"ends": ..., "layers": {stack: ...}}`.
        residuals: stack -> buffers for what backwards read.
        inputs: chunk inputs that have arrived.
        cotangents: gradients of chunk outputs that have arrived.
        head_inputs: outputs of the last chunk.
    """

    sums: dict[str, jax.Array]
    gradients: dict[str, Tree]
    residuals: ChunkResiduals
    inputs: Tree | None
    cotangents: Tree | None
    head_inputs: Tree | None


class TrainingStage(Stage):
    """A stage that runs forwards, backwards and weight gradients."""

    def train(self) -> tuple[dict[str, jax.Array], dict[str, Tree]]:
        """Run a training schedule; return this device's (sums, gradients)."""
        plan = self._plan
        gradients = {"ends": zeros(wide(self._ends.params)), "layers": self._chunks.no_gradients()}
        carry = TrainingCarry(
            sums=zeros(self.sums),
            gradients=counted_as("gradients", gradients),
            residuals=self._chunks.residuals(plan.depths),
            inputs=self._buffer("input"),
            cotangents=self._buffer("cotangent"),
            head_inputs=self._buffer("head_input"),
        )
        column = plan.table.column(self._index)
        with jax.named_scope(TICKS):
            carry, _ = jax.lax.scan(self._train_tick, carry, column)
        return carry.sums, carry.gradients

    def _train_tick(self, carry: TrainingCarry, row: Row) -> tuple[TrainingCarry, None]:
        """Run one tick; the order of the code is the order of the phases."""
        ends = self._ends
        arrivals: dict[Channel, Tree] = {}
        change = dataclasses.replace

        carry = change(carry, inputs=ends.embed_ahead(carry.inputs, row))
        # Arrived values are read ahead of the `lax.cond`s, so that the branches do not take whole
        # buffers as operands.
        x_forward = read_or_none(carry.inputs, row.forward.slots.input)
        x_backward = read_or_none(carry.inputs, row.backward.slots.input)
        dy = read_or_none(carry.cotangents, row.backward.slots.cotangent)

        if row.forward.always is not False:
            y, residuals, head_inputs = row.forward.if_runs(
                lambda: self._forward(carry, row.forward, x_forward),
                lambda: (zeros(self._x), carry.residuals, carry.head_inputs),
            )
            carry = change(carry, residuals=residuals, head_inputs=head_inputs)
            arrivals |= self._send(FORWARD, y)

        sums, of_ends, dy_of_head = ends.head_ahead(
            carry.sums, carry.gradients["ends"], carry.head_inputs, row
        )
        carry = change(carry, sums=sums, gradients=carry.gradients | {"ends": of_ends})

        dx, sums, gradients, residuals = row.backward.if_runs(
            lambda: self._backward(carry, row.backward, x_backward, dy, dy_of_head),
            lambda: (zeros(self._x), carry.sums, carry.gradients, carry.residuals),
        )
        carry = change(carry, sums=sums, gradients=gradients, residuals=residuals)
        arrivals |= self._send(BACKWARD, dx)

        of_ends = ends.embed_gradient_after(carry.gradients["ends"], dx, row)
        carry = change(carry, gradients=carry.gradients | {"ends": of_ends})

        if row.weight_gradient.always is not False:
            gradients = row.weight_gradient.if_runs(
                lambda: self._weight_gradient(carry, row.weight_gradient),
                lambda: carry.gradients,
            )
            carry = change(carry, gradients=gradients)

        inputs = self._receive(FORWARD, carry.inputs, arrivals, row)
        cotangents = self._receive(BACKWARD, carry.cotangents, arrivals, row)
        return change(carry, inputs=inputs, cotangents=cotangents), None

    def _forward(
        self, carry: TrainingCarry, operation: Operation, arrived: Tree
    ) -> tuple[Tree, ChunkResiduals, Tree]:
        """Run a chunk's forward; return (output, residuals, head_inputs).

        The residuals are not kept if the backward recomputes them.
        """
        chunk = operation.chunk
        microbatch = self._microbatch(operation.microbatch)
        x = self._ends.chunk_input(operation, lambda: arrived, microbatch)
        residuals = carry.residuals
        if self._plan.recomputes:
            y = self._chunks.evaluate(chunk, x, microbatch)
        else:
            y, residuals = self._chunks.forward(chunk, x, microbatch, residuals, operation.slots)
        head_inputs = carry.head_inputs
        if head_inputs is not None:
            head_inputs = operation.if_last(
                lambda: write(carry.head_inputs, operation.slots.head_input, y),
                lambda: carry.head_inputs,
            )
        return y, residuals, head_inputs

    def _backward(
        self, carry: TrainingCarry, operation: Operation, arrived: Tree, dy: Tree, from_head: Tree
    ) -> tuple[Tree, dict, dict, ChunkResiduals]:
        """Run a chunk's backward; return (input's cotangent, sums, gradients, residuals).

        Args:
            carry: the carry.
            operation: the backward, or the input gradient.
            arrived: the chunk's input, if it arrived from another chunk.
            dy: gradient of the chunk's output, if it arrived from another chunk.
            from_head: gradient of the head's input, if all stages have just computed it.
        """
        chunk = operation.chunk
        microbatch = self._microbatch(operation.microbatch)
        residuals = carry.residuals
        slots = operation.slots
        y = None
        if self._plan.recomputes:
            x = self._ends.chunk_input(operation, lambda: arrived, microbatch)
            residuals = self._with_scratch(residuals)
            slots = dataclasses.replace(slots, saved=jnp.int32(0))
            y, residuals = self._chunks.forward(chunk, x, microbatch, residuals, slots)
        if carry.head_inputs is not None:
            y = read(carry.head_inputs, slots.head_input)
        sums, ends, dx = self._ends.output_cotangent(
            operation,
            carry.sums,
            carry.gradients["ends"],
            from_head,
            lambda: dy,
            y,
            microbatch,
        )
        gradients = carry.gradients | {"ends": ends}
        dx, gradients, residuals = self._chunks.backward(
            chunk, dx, microbatch, residuals, slots, gradients
        )
        ends = self._ends.add_embed_gradient(operation, gradients["ends"], dx, microbatch)
        if self._plan.recomputes:
            residuals = _without_scratch(residuals)
        return dx, sums, gradients | {"ends": ends}, residuals

    def _with_scratch(self, residuals: ChunkResiduals) -> ChunkResiduals:
        """Add buffers with one slot for residuals that only the current operation reads."""
        scratch = self._chunks.residuals({"saved": 1})
        return {
            name: dataclasses.replace(
                of_stack, saved=scratch[name].saved, before=scratch[name].before
            )
            for name, of_stack in residuals.items()
        }

    def _weight_gradient(self, carry: TrainingCarry, operation: Operation) -> dict[str, Tree]:
        """Return the gradients with the weight gradients of a chunk added."""
        microbatch = self._microbatch(operation.microbatch)
        return self._chunks.weight_gradient(
            operation.chunk, microbatch, carry.residuals, operation.slots, carry.gradients
        )

    def reduced(self, gradients: dict[str, Tree]) -> dict[str, Tree]:
        """Return the gradients summed over all devices, each sharded like its parameter."""
        of_stacks = gradients["layers"].items()
        reduced = {
            "ends": self._shards_of_ends.reduced(gradients["ends"]),
            "layers": {name: self._shards_of_stacks[name].reduced(g) for name, g in of_stacks},
        }
        return counted_as("gradients", reduced)


def _without_scratch(residuals: ChunkResiduals) -> ChunkResiduals:
    """Remove the buffers that `TrainingStage._with_scratch` added."""
    return {
        name: dataclasses.replace(of_stack, saved=None, before=None)
        for name, of_stack in residuals.items()
    }
