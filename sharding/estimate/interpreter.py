"""Runs the program of a step with sizes instead of numbers, as memory_estimate.py explains."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import jax

from sharding.estimate.allocator import Allocator
from sharding.estimate.labels import LABELS
from sharding.estimate.late_products import with_late_products
from sharding.estimate.operations import Loop, Operation, Program, Value
from sharding.estimate.primitives import (
    COLLECTIVES,
    COSTLY,
    IN_PLACE,
    KERNELS,
    MOVES,
    PRODUCTS,
    REDUCTIONS,
    UNFUSED,
    VIEWS,
)
from sharding.estimate.step_cost import StepCost
from sharding.estimate.storage import Buffer, Frame, Storage, pairs
from sharding.jaxprs import dot_general_flops

#: XLA's GPU compiler changed its behaviour in between, as measured with jax 0.10.2 and 0.12.0.
_IS_NEW_XLA = jax.__version_info__ >= (0, 12)
#: cuBLAS's workspace, which exists while a product runs.
WORKSPACE_BYTES = 4 * 2**20
#: The same for a product that reads a loop's slice of an array and whose result is not added.
SLICED_WORKSPACE_BYTES = (32 if _IS_NEW_XLA else 4) * 2**20
#: Whether branches of a conditional copy inputs of the enclosing program before updating them.
COPIES_IN_BRANCHES = not _IS_NEW_XLA


class Interpreter:
    """Runs programs with sizes instead of numbers.

    Counts the readers of every value. A value without readers releases its buffers, so that the
    allocator frees those that no value holds.

    Attributes:
        memory: allocates the buffers, and keeps their totals and peaks.
        copied: bytes of inputs that are copied before they are updated.
        work: the work of the operations that have run.
    """

    def __init__(self, mesh_shape: Mapping[str, int], platform: str):
        self._mesh_shape = mesh_shape
        self._is_cpu = platform == "cpu"
        self.memory = Allocator(mesh_shape)
        self.copied: list[int] = []
        self.work = StepCost()

    def program(
        self,
        program: Program,
        inputs: Sequence[Storage],
        num_made: int,
        *,
        is_whole: bool = False,
        places: Sequence[Buffer] = (),
    ) -> list[Storage]:
        """Run a program and return the storage of its outputs.

        Args:
            program: the program.
            inputs: storage of its inputs. The caller hands over the inputs, and has to release the
                returned outputs.
            num_made: number of leading outputs that must be arrays in memory.
            is_whole: whether this is the whole step, rather than a body or branch.
            places: buffers for the leading outputs, used if they are free when an output is made.
        """
        if not self._is_cpu:
            program = with_late_products(program, is_body=not is_whole)
        frame = Frame(program)
        if places:
            frame.place(program, dict(zip(program.outputs, places, strict=False)))
        if not is_whole:
            frame.own_inputs.update(buffer for storage in inputs for buffer in storage.buffers)
        for value, storage in zip(program.inputs, inputs, strict=True):
            if frame.num_uses[value]:
                frame.storage[value] = storage
            else:
                self.memory.release(storage)
        for op in program.operations:
            self._operation(op, frame)
        outputs = []
        for i, value in enumerate(program.outputs):
            if i < num_made:
                self._make(value, frame, is_output=is_whole)
            outputs.append(self.memory.retain(frame[value]))
            self._done(frame, value)
        assert not frame.storage
        return outputs

    def _done(self, frame: Frame, *values: Value) -> None:
        """Record that each of the values has been read once."""
        for value in values:
            frame.num_uses[value] -= 1
            if frame.num_uses[value] <= 0 and value in frame.storage:
                self.memory.release(frame.storage.pop(value))

    def _make(self, value: Value, frame: Frame, *, is_output: bool = False) -> Storage:
        """Store a value as an array in memory, and return its storage.

        The array is written over a buffer that the value is computed from, if one has the same size
        and no other reader; otherwise it is newly allocated.

        Args:
            value: the value, which may be part of a fusion so far.
            frame: the program's values.
            is_output: whether it is an output of the whole step. Outputs are made together, each
                over an input if possible.
        """
        storage = frame[value]
        if storage.is_made:
            return storage
        size = self.memory.size(value)
        made = None
        # Prefer a buffer with few other readers; outputs of the step may take one that has some.
        for buffer in sorted(storage.buffers, key=lambda buffer: buffer.num_holders):
            is_same = (buffer.num_bytes, buffer.on_host) == (size, value.on_host)
            is_free = buffer.num_holders == 1 or is_output and not buffer.is_written_over
            if not self._is_cpu and not is_output and value in frame.is_reduced:
                is_free = False  # a fusion that also reduces its result writes over no input
            if made is None and is_same and is_free and buffer not in storage.moved:
                made = self.memory.retain(Storage((buffer,), is_made=True))
                is_read = buffer.is_read_at_end or buffer.num_holders > 2
                if self._is_cpu and is_output and is_read:
                    self.copied.append(buffer.num_bytes)
                buffer.is_written_over = is_output
            buffer.is_read_at_end |= is_output
        made = made or self.memory.allocate(value, storage.label, frame.places.get(value))
        self.memory.release(storage)
        frame.storage[value] = made
        return made

    def _operation(self, op: Operation, frame: Frame) -> None:
        if isinstance(op, Loop):
            outputs = self._loop(op, frame)
        elif op.name == "cond":
            outputs = self._cond(op, frame)
        elif op.name in (*VIEWS, "device_put"):
            outputs = self._view(op, frame)
        elif op.name in (*UNFUSED, *REDUCTIONS) or op.name.startswith(KERNELS):
            outputs = self._unfused(op, frame)
        else:
            outputs = self._fused(op, frame)
        for value, storage in zip(op.outputs, outputs, strict=True):
            # Free unread outputs at once. Store expensive values that several operations read,
            # where XLA would otherwise recompute them in each reader's fusion.
            if not frame.num_uses[value]:
                self.memory.release(storage)
                continue
            frame.storage[value] = storage
            is_shared = storage.is_costly and frame.num_uses[value] > 1
            is_early = self._is_cpu and op.name == "broadcast_in_dim" and value in frame.is_early
            if is_shared or is_early:
                self._make(value, frame)

    def _view(self, op: Operation, frame: Frame) -> list[Storage]:
        """Return an existing array under another name, or copy it between device and host."""
        outputs = []
        for value, output in pairs(op):
            storage = frame[value]
            if op.name == "device_put" and value.on_host != output.on_host:
                self._make(value, frame)
                outputs.append(self.memory.allocate(output, storage.label))
                self.work.host_bytes += self.memory.size(output)
                continue
            if op.name == "name" and op.params["name"] in LABELS:
                storage = dataclasses.replace(storage, label=op.params["name"])
                for buffer in storage.buffers if storage.is_made else ():
                    buffer.label = storage.label
            outputs.append(self.memory.retain(storage))
        self._done(frame, *op.inputs)
        return outputs

    def _fused(self, op: Operation, frame: Frame) -> list[Storage]:
        """Add an element-wise operation to a fusion: allocate nothing, keep its inputs alive."""
        inputs = [frame[value] for value in op.inputs]
        buffers = tuple(dict.fromkeys(b for storage in inputs for b in storage.buffers))
        is_costly = op.name in COSTLY or any(h.is_costly and not h.is_made for h in inputs)
        moved = frozenset(buffers if op.name in MOVES else (b for h in inputs for b in h.moved))
        fused = Storage(buffers, is_costly=is_costly, moved=moved)
        outputs = [self.memory.retain(fused) for _ in op.outputs]
        self._done(frame, *op.inputs)
        return outputs

    def _unfused(self, op: Operation, frame: Frame) -> list[Storage]:
        """Run an operation whose inputs and outputs are arrays in memory."""
        reads_slice = any(frame[value].is_slice for value in op.inputs)
        for i, value in enumerate(op.inputs):
            # Two kinds of inputs need not be stored, because they are fused with their reader: the
            # update of a dynamic_update_slice and, except on CPUs, the input of a reduction.
            is_fused = op.name == "dynamic_update_slice" and i == 1
            if not is_fused and (self._is_cpu or op.name not in REDUCTIONS):
                self._make(value, frame)
        outputs = []
        for value, output in pairs(op):
            storage = frame[value]
            size = self.memory.size(output)
            is_last = (
                storage.is_made and frame.num_uses[value] == storage.buffers[0].num_holders == 1
            )
            if op.name in IN_PLACE and is_last and storage.buffers[0].num_bytes == size:
                outputs.append(self.memory.retain(storage))
            else:
                outputs.append(self.memory.allocate(output, place=frame.places.get(output)))
        if op.name in PRODUCTS and not self._is_cpu:
            reads_slice &= frame.is_added.isdisjoint(op.outputs)
            size = SLICED_WORKSPACE_BYTES if reads_slice else WORKSPACE_BYTES
            workspace = Value((size,), itemsize=1, on_host=False, axes=((),))
            self.memory.release(self.memory.allocate(workspace))
        self._count(op)
        self._done(frame, *op.inputs)
        return outputs

    def _count(self, op: Operation) -> None:
        """Count the work of an operation."""
        if op.name == "dot_general":
            left = op.inputs[0].local_shape(self._mesh_shape)
            output = op.outputs[0].local_shape(self._mesh_shape)
            flops = dot_general_flops(op.params, left, output)
            num_bytes = sum(map(self.memory.size, (*op.inputs, *op.outputs)))
            self.work.products[flops, num_bytes] += 1
        elif op.name in COLLECTIVES:
            self.work.network_bytes += sum(map(self.memory.size, op.outputs))

    def _loop(self, op: Loop, frame: Frame) -> list[Storage]:
        """Run a loop: its body once, with the work of all iterations."""
        consts = op.num_consts
        carried = op.num_consts + op.num_carry
        inputs = []
        for i, value in enumerate(op.inputs):
            storage = self._make(value, frame)
            # The carry lives in the buffer of its initial value, or in a copy if others read that.
            if consts <= i < carried:
                is_last = frame.num_uses[value] == storage.buffers[0].num_holders == 1
                inputs.append(
                    self.memory.retain(storage)
                    if is_last
                    else self.memory.allocate(value, storage.label)
                )
                self._done(frame, value)
            else:  # a scanned input is not copied: each slice is read from the whole array
                is_const = i < consts
                seen = Storage(storage.buffers, is_made=is_const, is_slice=not is_const)
                inputs.append(self.memory.retain(seen))
        # Stacked outputs are allocated as a whole before the first iteration.
        stacked = [self.memory.allocate(value) for value in op.outputs[op.num_carry :]]
        before = self.work
        self.work = StepCost()
        if self._is_cpu:
            outputs = self.program(op.bodies[0], inputs, op.num_carry)
        else:
            outputs = self._in_places(op, inputs, [h.buffers[0] for h in inputs[consts:carried]])
        before.add(self.work, op.trip_count)
        self.work = before
        self._done(frame, *op.inputs[:consts], *op.inputs[carried:])
        for storage in outputs[op.num_carry :]:
            self.memory.release(storage)
        return [*outputs[: op.num_carry], *stacked]

    def _in_places(
        self, op: Loop, inputs: Sequence[Storage], places: Sequence[Buffer]
    ) -> list[Storage]:
        """Run a loop's body; its carry returns to its own buffers, by a copy if necessary."""
        for place in places:
            place.num_loops += 1
        outputs = self.program(op.bodies[0], inputs, op.num_carry, places=places)
        carried = [self.memory.retain(Storage((place,), is_made=True)) for place in places]
        for made in outputs[: op.num_carry]:
            self.memory.release(made)
        for place in places:
            place.num_loops -= 1
        return [*carried, *outputs[op.num_carry :]]

    def _cond(self, op: Operation, frame: Frame) -> list[Storage]:
        """Run every branch from the same state; the work of the most expensive one is counted."""
        inputs = [self._make(value, frame) for value in op.inputs][1:]
        kept = []
        if COPIES_IN_BRANCHES and not self._is_cpu:
            # Holding an input of the enclosing program keeps branches from updating it in place.
            kept = [
                self.memory.retain(h) for h in inputs if not frame.own_inputs.isdisjoint(h.buffers)
            ]
        start = self._snapshot(frame)
        work = self.work
        results = []
        works = []
        for body in op.bodies:
            self._restore(start, frame)
            self.work = StepCost()
            storage = [self.memory.retain(h) for h in inputs]
            self._done(frame, *op.inputs)
            results.append(self.program(body, storage, len(op.outputs)))
            works.append(self.work)
        self._restore(start, frame)
        self.work = work
        work.add(max(works, key=lambda w: (w.flops, w.host_bytes + w.network_bytes)))
        outputs: list[Storage | None] = []
        was_there = self.memory.live_buffers()
        # If all branches return the same existing buffer, the output is that buffer.
        for made in zip(*results, strict=True):
            found = {storage.buffers for storage in made}
            is_kept = len(found) == 1 and was_there.issuperset(*found)
            outputs.append(self.memory.retain(made[0]) if is_kept else None)
        self._done(frame, *op.inputs)
        made = [
            storage or self.memory.allocate(v)
            for storage, v in zip(outputs, op.outputs, strict=True)
        ]
        for storage in kept:
            self.memory.release(storage)
        return made

    def _snapshot(self, frame: Frame) -> tuple:
        """Return a snapshot of everything that running a branch changes."""
        return self.memory.snapshot(), dict(frame.storage), dict(frame.num_uses)

    def _restore(self, snapshot: tuple, frame: Frame) -> None:
        """Restore a snapshot made by `_snapshot`."""
        memory, storage, num_uses = snapshot
        self.memory.restore(memory)
        frame.storage = dict(storage)
        frame.num_uses = collections.Counter(num_uses)
