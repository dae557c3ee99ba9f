"""Runs the program of a step with sizes instead of numbers, as memory_estimate.py explains."""

import collections
import dataclasses
from collections.abc import Sequence

from predict.memory.kernels import IS_NEW_XLA, Kernels
from predict.memory.operations import STORED, Loop, Operation, Program, Value
from predict.memory.passes.late_products import values_sent_on, with_late_products
from predict.memory.passes.unrolled import with_overlapped_layers
from predict.memory.primitives import KERNELS, REDUCTIONS, UNFUSED, VIEWS
from predict.memory.step_cost import StepCost
from predict.memory.storage import Buffer, Frame, Storage

#: Whether branches of a conditional copy inputs of the enclosing program before updating them.
COPIES_IN_BRANCHES = not IS_NEW_XLA


class Interpreter(Kernels):
    """Runs programs with sizes instead of numbers: their operations, loops and conditionals.

    Counts the readers of every value. A value without readers releases its buffers, so that the
    allocator frees those that no value holds.
    """

    def program(
        self,
        program: Program,
        inputs: Sequence[Storage],
        num_made: int,
        *,
        is_whole: bool = False,
        places: Sequence[Buffer | None] = (),
    ) -> list[Storage]:
        """Run a program and return the storage of its outputs.

        Args:
            inputs: storage of its inputs. The caller hands over the inputs, and has to release the
                returned outputs.
            num_made: number of leading outputs that must be arrays in memory.
            is_whole: whether this is the whole step, rather than a body or branch.
            places: buffers for the leading outputs, used if they are free when an output is made.
        """
        if not self.is_cpu:
            program = with_late_products(with_overlapped_layers(program), is_body=not is_whole)
        frame = Frame(program, is_cpu=self.is_cpu)
        if places:
            pairs = zip(program.outputs, places, strict=False)
            frame.place(program, {value: place for value, place in pairs if place is not None})
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
                self.make(value, frame, is_output=is_whole)
            outputs.append(self.memory.retain(frame[value]))
            self.done(frame, value)
        assert not frame.storage
        return outputs

    def _operation(self, op: Operation, frame: Frame) -> None:
        if isinstance(op, Loop):
            outputs = self._loop(op, frame)
        elif op.name == "cond":
            outputs = self._cond(op, frame)
        elif op.name == STORED:
            for value in op.inputs:
                self.make(value, frame)
                self.done(frame, value)
            outputs = []
        elif op.name in (*VIEWS, "device_put"):
            outputs = self.view(op, frame)
        elif op.name in (*UNFUSED, *REDUCTIONS) or op.name.startswith(KERNELS):
            outputs = self.unfused(op, frame)
        else:
            outputs = self.fused(op, frame)
        for value, storage in zip(op.outputs, outputs, strict=True):
            if not frame.num_uses[value]:  # free unread outputs at once
                self.memory.release(storage)
                continue
            if storage.is_costly and value in frame.summands and not self.is_cpu:
                # The fusion of the reduction also computes the operations after it. It cannot write
                # their result over an array that it reads.
                storage = dataclasses.replace(storage, moved=frozenset(storage.buffers))
            frame.storage[value] = storage
            if self._is_stored_early(op, value, frame):
                self.make(value, frame)

    def _is_stored_early(self, op: Operation, value: Value, frame: Frame) -> bool:
        """Return whether an output is stored although its readers could compute it themselves."""
        # Expensive values are stored if they would be computed several times.
        if frame[value].is_costly and frame.num_recomputations[value] > 1:
            return True
        if self.is_cpu:
            return op.name == "broadcast_in_dim" and value in frame.is_early
        # If a reduction and two more operations read a value, the reduction's fusion stores it. All
        # three repeat a selection, which hides the padding of a vocabulary.
        if value in frame.summands and frame.num_uses[value] > 2 and op.name != "select_n":
            return True
        # XLA's kernels for norms read whole arrays, so a slice that they read is copied.
        return op.name == "dynamic_slice" and value in frame.is_reduced

    def _loop(self, op: Loop, frame: Frame) -> list[Storage]:
        """Run a loop: its body once, with the work of all iterations."""
        consts = op.num_consts
        carried = op.num_consts + op.num_carry
        inputs = []
        unsplit = self.unsplit_arrays(op.inputs, frame)
        for i, value in enumerate(op.inputs):
            storage = self.make(value, frame)
            if value in unsplit:
                self.memory.release(unsplit.pop(value))
            # The carry lives in the buffer of its initial value, or in a copy if others read that.
            if consts <= i < carried:
                is_last = frame.num_uses[value] == storage.buffers[0].num_holders == 1
                inputs.append(
                    self.memory.retain(storage)
                    if is_last
                    else self.memory.allocate(value, storage.label)
                )
                self.done(frame, value)
            else:  # a scanned input is not copied: each slice is read from the whole array
                is_const = i < consts
                seen = Storage(storage.buffers, is_made=is_const, is_slice=not is_const)
                inputs.append(self.memory.retain(seen))
        # Stacked outputs are allocated as a whole before the first iteration.
        stacked = [self.memory.allocate(value) for value in op.outputs[op.num_carry :]]
        before = self.work
        self.work = StepCost()
        if self.is_cpu:
            outputs = self.program(op.bodies[0], inputs, op.num_carry)
        else:
            sent = [self.memory.allocate(value) for value in values_sent_on(op.bodies[0])]
            outputs = self._in_places(op, inputs, [h.buffers[0] for h in inputs[consts:carried]])
            for storage in sent:
                self.memory.release(storage)
        before.add(self.work, op.trip_count)
        self.work = before
        self.done(frame, *op.inputs[:consts], *op.inputs[carried:])
        for storage in outputs[op.num_carry :]:
            self.memory.release(storage)
        return [*outputs[: op.num_carry], *stacked]

    def _in_places(
        self, op: Loop, inputs: Sequence[Storage], places: Sequence[Buffer]
    ) -> list[Storage]:
        """Run a loop's body; its carry returns to its own buffers, by a copy if necessary."""
        for place in places:
            place.num_pins += 1
        outputs = self.program(op.bodies[0], inputs, op.num_carry, places=places)
        carried = [self.memory.retain(Storage((place,), is_made=True)) for place in places]
        for storage in outputs[: op.num_carry]:
            self.memory.release(storage)
        for place in places:
            place.num_pins -= 1
        return [*carried, *outputs[op.num_carry :]]

    def _cond(self, op: Operation, frame: Frame) -> list[Storage]:
        """Run every branch from the same state; the work of the most expensive one is counted."""
        inputs = [self.make(value, frame) for value in op.inputs][1:]
        held_inputs = []
        places: list[Buffer | None] = [None] * len(op.outputs)
        if not self.is_cpu and COPIES_IN_BRANCHES:
            # Holding an input of the enclosing program keeps branches from updating it in place.
            held_inputs = [
                self.memory.retain(h) for h in inputs if not frame.own_inputs.isdisjoint(h.buffers)
            ]
        elif not self.is_cpu:
            places = _passed_through(op, inputs)
        pinned = [place for place in places if place is not None]
        for place in pinned:
            place.num_pins += 1
        start = self._snapshot(frame)
        work = self.work
        results = []
        works = []
        for body in op.bodies:
            self._restore(start, frame)
            self.work = StepCost()
            storage = [self.memory.retain(h) for h in inputs]
            self.done(frame, *op.inputs)
            results.append(self.program(body, storage, len(op.outputs), places=places))
            works.append(self.work)
        self._restore(start, frame)
        for place in pinned:
            place.num_pins -= 1
        self.work = work
        work.add(max(works, key=lambda w: (w.flops, w.host_bytes + w.network_bytes)))
        outputs: list[Storage | None] = []
        was_there = self.memory.live_buffers()
        # If all branches return the same existing buffer, the output is that buffer.
        for alternatives in zip(*results, strict=True):
            buffer_sets = {storage.buffers for storage in alternatives}
            is_kept = len(buffer_sets) == 1 and was_there.issuperset(*buffer_sets)
            outputs.append(self.memory.retain(alternatives[0]) if is_kept else None)
        self.done(frame, *op.inputs)
        output_storage = [
            storage or self.memory.allocate(v)
            for storage, v in zip(outputs, op.outputs, strict=True)
        ]
        for storage in held_inputs:
            self.memory.release(storage)
        return output_storage

    def _snapshot(self, frame: Frame) -> tuple:
        """Return a snapshot of everything that running a branch changes."""
        return self.memory.snapshot(), dict(frame.storage), dict(frame.num_uses)

    def _restore(self, snapshot: tuple, frame: Frame) -> None:
        """Restore a snapshot made by `_snapshot`."""
        memory, storage, num_uses = snapshot
        self.memory.restore(memory)
        frame.storage = dict(storage)
        frame.num_uses = collections.Counter(num_uses)


def _passed_through(op: Operation, inputs: Sequence[Storage]) -> list[Buffer | None]:
    """Return, for each output of a conditional, the buffer of the input that is passed through.

    If one branch returns an input as it is, the other branches write their results over it:

        cond(is_active, lambda old: compute(), lambda old: old, old)

    None stands for outputs that every branch computes.
    """
    places: list[Buffer | None] = []
    for i in range(len(op.outputs)):
        place = None
        for body in op.bodies:
            if body.outputs[i] in body.inputs:
                (place,) = inputs[body.inputs.index(body.outputs[i])].buffers
        places.append(place if place not in places else None)
    return places
