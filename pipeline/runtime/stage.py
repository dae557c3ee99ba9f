"""One device's view of a pipelined step: parameters, microbatches, its column of the program.

A stage runs the same tick again and again. This module has everything that training (training.py)
and evaluation share, and the tick of an evaluation.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.runtime.chunks import Chunks, StackPart, running_alone
from pipeline.runtime.embed_and_head import OnAllStages, OnOneStage
from pipeline.runtime.gather import ParamSharding
from pipeline.runtime.layers import Layers, Work
from pipeline.runtime.packed_activations import PackedActivations
from pipeline.runtime.pipeline_functions import PipelineFunctions, stacks_with_backward
from pipeline.runtime.tick_program import TickProgram
from pipeline.runtime.tick_table import TICKS, Channel, ChunkOperation, TickTable
from pipeline.runtime.trees import Flag, add, read, wide_types, write, zeros
from pipeline.schedules.table import FORWARD
from pipeline.stack_layout import StackLayout
from sharding.labels import counted_as
from sharding.ops.update_if import update_if
from sharding.spec import axes_of

Tree = Any
Params = dict[str, Tree]


class Stage:
    """One device's stage.

    Args:
        functions: model's functions.
        program: schedule, ready to be executed.
        layouts: layout of every stack, in the order in which the stacks run.
        param_sharding: how the parameters are sharded over the mesh.
        params: this device's shards of the parameters, `{"non_stack": ..., "stacks": ...}`.
        microbatches: this device's part of all microbatches, arrays `[M, B, ...]`.
    """

    def __init__(
        self,
        functions: PipelineFunctions,
        program: TickProgram,
        layouts: Mapping[str, StackLayout],
        param_sharding: ParamSharding,
        params: Params,
        microbatches: Tree,
    ):
        self._functions = functions
        self._program = program
        self._microbatches = microbatches
        assert {len(x) for x in jax.tree.leaves(microbatches)} == {program.num_microbatches}
        self._stage_index = jax.lax.axis_index("pipeline")
        self._first_microbatch = self._microbatch(jnp.int32(0))
        self._non_stack_gatherer = param_sharding.non_stack_gatherer()
        self._stack_gatherers = {name: param_sharding.stack_gatherer(name) for name in layouts}
        self._non_stack_params = self._non_stack_gatherer.gather_once(params["non_stack"])
        types = functions.activation_types(self._non_stack_params, self._first_microbatch)
        self._stacks_with_backward = stacks_with_backward(
            functions, self._non_stack_params, self._first_microbatch
        )
        self._packed = PackedActivations([x for pair in types.values() for x in pair])
        self._x_type = self._packed.type
        _, head_input_type = [*types.values()][-1]
        arguments = (functions, self._packed, head_input_type, self._non_stack_params)
        if program.shares_vocab:
            is_split = jax.tree.map(
                lambda spec: "pipeline" in axes_of(spec), param_sharding.specs["non_stack"]
            )
            self._embed_and_head = OnAllStages(
                self._stage_index,
                program.first_stage,
                program.last_stage,
                is_split,
                microbatches,
                *arguments,
            )
        else:
            self._embed_and_head = OnOneStage(*arguments)
        parts = {
            name: self._part(name, layout, types[name], params["stacks"][name])
            for name, layout in layouts.items()
        }
        self._chunks = Chunks(parts)

    def _part(
        self, name: str, layout: StackLayout, types: tuple[Tree, Tree], params: Tree
    ) -> StackPart:
        """Return this device's part of a stack."""
        input_type, block_type = types
        frozen = self._functions.frozen
        gatherer = self._stack_gatherers[name]
        layers = Layers(
            block=self._functions.blocks[name],
            params=gatherer.gather_once(params),
            gatherer=gatherer,
            layout=layout,
            stage_index=self._stage_index,
            x=block_type,
            microbatch=self._first_microbatch,
            splits=self._program.splits_backward,
            unrolls=self._program.unrolls,
            accumulates=self._program.num_microbatches > 1,
            frozen=None if frozen is None else frozen["stacks"][name],
        )
        contains_layers = [[count > 0 for _, count in stage] for stage in layout.chunks]
        contains_first = [[start == 0 < count for start, count in stage] for stage in layout.chunks]
        return StackPart(
            layers=layers,
            before=running_alone(name, self._functions.before.get(name)),
            input_type=input_type,
            block_type=block_type,
            contains_layers=Flag(contains_layers, self._stage_index),
            contains_first=Flag(contains_first, self._stage_index),
            has_backward=name in self._stacks_with_backward,
            packed=self._packed,
            non_stack_params=self._non_stack_params,
        )

    @property
    def _sums_type(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the head's sums."""
        return wide_types(
            jax.eval_shape(self._embed_and_head.sums, self._x_type, self._first_microbatch)
        )

    # Evaluation.

    def evaluate(self) -> dict[str, Tree]:
        """Run a table of forwards; return the head's sums, which are 0 except on the last stage."""

        def include(sums: Tree, x: Tree, index: jax.Array) -> Tree:
            return add(sums, self._embed_and_head.sums(x, self._microbatch(index)))

        return self._collect(zeros(self._sums_type), include)

    def teach(self) -> dict[str, jax.Array]:
        """Run a table of forwards; return the outputs of `teach` for all microbatches.

        They are arrays `[M, B, ...]`, and 0 except on the last stage.
        """

        def outputs(x: Tree, microbatch: Tree) -> dict[str, jax.Array]:
            return self._embed_and_head.teacher_outputs(x, microbatch)

        def include(all_outputs: Tree, x: Tree, index: jax.Array) -> Tree:
            return write(all_outputs, index, outputs(x, self._microbatch(index)))

        output_type = jax.eval_shape(outputs, self._x_type, self._first_microbatch)
        return self._collect(zeros(output_type, self._program.num_microbatches), include)

    def _collect(self, result: Tree, include: Callable[[Tree, Tree, jax.Array], Tree]) -> Tree:
        """Run a table of forwards, and collect a result from the output of every microbatch.

        Args:
            result: initial value of the result.
            include: (result so far, output of the last layer, microbatch) -> result.

        Returns:
            The result after all microbatches. Only the last stage has it; others return the initial
            value.
        """

        def run_tick(carry: tuple[Tree, Tree], tick: TickTable) -> tuple[tuple[Tree, Tree], None]:
            result, inputs = carry
            inputs = self._embed_and_head.embed_ahead(inputs, tick)
            arrived = read_or_none(inputs, tick.forward.slots.input)

            def forward(y: Tree) -> Tree:
                work = self._work(tick.forward)
                x = self._embed_and_head.chunk_input(tick.forward, arrived, work.microbatch)
                return self._chunks.chunk_forward(work, x)

            y = update_if(tick.forward.runs, forward, zeros(self._x_type))
            arrivals = self._send(FORWARD, y)
            result = self._embed_and_head.collect(include, result, y, tick)
            return (result, self._receive(FORWARD, inputs, arrivals, tick)), None

        column = self._program.table.column(self._stage_index)
        with jax.named_scope(TICKS):
            return jax.lax.scan(run_tick, (result, self._buffer("input")), column)[0][0]

    # Buffers and sends.

    def _work(self, operation: ChunkOperation) -> Work:
        microbatch = self._microbatch(operation.microbatch)
        return Work(chunk=operation.chunk, microbatch=microbatch, slots=operation.slots)

    def _microbatch(self, index: jax.Array) -> Tree:
        return read(self._microbatches, index)

    def _buffer(self, name: str) -> Tree | None:
        """Return an empty buffer of activations, or None if the program has no such buffer."""
        if name not in self._program.num_slots:
            return None
        num_slots = self._program.num_slots[name]
        return counted_as("activations", zeros(self._x_type, num_slots + (num_slots > 0)))

    def _send(self, kind: str, x: Tree) -> dict[Channel, Tree]:
        """Send `x` over all channels of a kind, and return the value that arrives over each."""

        def moved(channel: Channel) -> Tree:
            if channel.shift == 0:
                return x

            def move(leaf):
                return jax.lax.ppermute(leaf, "pipeline", channel.pairs)

            return jax.tree.map(move, x)

        return {
            channel: moved(channel) for channel in self._program.channels if channel.kind == kind
        }

    def _receive(
        self, kind: str, buffer: Tree, arrivals: dict[Channel, Tree], tick: TickTable
    ) -> Tree:
        """Return the buffer with the arrivals of one kind written to their slots."""
        for channel, slot in zip(self._program.channels, tick.arrival_slots, strict=True):
            if channel.kind == kind and channel in arrivals:
                buffer = write(buffer, slot, arrivals[channel])
        return buffer


def read_or_none(buffer: Tree | None, slot: jax.Array | None) -> Tree | None:
    """Return the contents of a slot, or None if there is no such buffer or it has no slots."""
    if slot is None or buffer is None or not jax.tree.leaves(buffer)[0].size:
        return None
    return read(buffer, slot)
