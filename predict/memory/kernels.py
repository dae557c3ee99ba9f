"""Runs single operations with sizes instead of numbers: views, fusions and other kernels.

XLA computes a chain of element-wise operations in one kernel, a fusion, and stores only its result.
So a value is a fusion at first, which refers to the buffers that it is computed from, until an
operation needs it as an array in memory.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax

from predict.memory.allocator import Allocator
from predict.memory.operations import Operation, Value
from predict.memory.primitives import (
    COLLECTIVES,
    COSTLY,
    IN_PLACE,
    MOVES,
    PRODUCTS,
    REDUCTIONS,
)
from predict.memory.step_cost import StepCost
from predict.memory.storage import Frame, Storage, pairs
from sharding.jaxprs import dot_general_flops
from sharding.labels import LABELS

#: XLA's GPU compiler changed its behaviour in between, as measured with jax 0.10.2 and 0.12.0.
IS_NEW_XLA = jax.__version_info__ >= (0, 12)
#: cuBLAS's workspace, which exists while a product runs.
WORKSPACE_BYTES = 4 * 2**20
#: The same for a product that reads a loop's slice of an array where the array is stored.
SLICED_WORKSPACE_BYTES = (32 if IS_NEW_XLA else 4) * 2**20


class Kernels:
    """Runs operations that contain no further programs, and keeps track of memory and work.

    Attributes:
        is_cpu: whether the step is compiled for CPUs.
        memory: allocates the buffers, and keeps their totals and peaks.
        copied: bytes of inputs that are copied before they are updated.
        work: work of the operations that have run.
        counted_slices: slices that loops read by their counters.
    """

    def __init__(
        self,
        mesh_shape: Mapping[str, int],
        platform: str,
        counted_slices: Iterable[Value] = (),
    ):
        self._mesh_shape = mesh_shape
        self.is_cpu = platform == "cpu"
        self.memory = Allocator(mesh_shape)
        self.copied: list[int] = []
        self.work = StepCost()
        self.counted_slices = frozenset(counted_slices)

    def view(self, op: Operation, frame: Frame) -> list[Storage]:
        """Return an existing array under another name, or copy it between device and host."""
        outputs = []
        for value, output in pairs(op):
            if op.name == "optimization_barrier" and not self.is_cpu:
                self.make(value, frame)
            storage = frame[value]
            if op.name == "device_put" and value.on_host != output.on_host:
                self.make(value, frame)
                outputs.append(self.memory.allocate(output, storage.label))
                self.work.host_bytes += self.memory.size(output)
                continue
            if op.name == "name" and op.params["name"] in LABELS:
                storage = dataclasses.replace(storage, label=op.params["name"])
                for buffer in storage.buffers if storage.is_made else ():
                    buffer.label = storage.label
            outputs.append(self.memory.retain(storage))
        self.done(frame, *op.inputs)
        return outputs

    def fused(self, op: Operation, frame: Frame) -> list[Storage]:
        """Add an element-wise operation to a fusion: allocate nothing, keep its inputs alive."""
        if not self.is_cpu:
            self._make_before_broadcast(op, frame)
        inputs = [frame[value] for value in op.inputs]
        buffers = tuple(dict.fromkeys(b for storage in inputs for b in storage.buffers))
        is_costly = op.name in COSTLY or any(h.is_costly and not h.is_made for h in inputs)
        moved = frozenset(buffers if op.name in MOVES else (b for h in inputs for b in h.moved))
        is_slice = op.outputs[0] in self.counted_slices and inputs[0].is_made
        fused = Storage(
            buffers,
            is_costly=is_costly,
            moved=moved,
            is_slice=is_slice,
            is_empty=op.name == "empty",
        )
        outputs = [self.memory.retain(fused) for _ in op.outputs]
        self.done(frame, *op.inputs)
        return outputs

    def _make_before_broadcast(self, op: Operation, frame: Frame) -> None:
        """Store expensive inputs that the operation broadcasts.

        For example, the mean of a norm is computed once per token, with the sum that it follows
        from, and not once per element of its readers.
        """
        size = max(math.prod(output.shape) for output in op.outputs)
        for value in op.inputs:
            is_broadcast = math.prod(value.shape) < size
            if is_broadcast and frame[value].is_costly and not frame[value].is_made:
                self.make(value, frame)

    def unfused(self, op: Operation, frame: Frame) -> list[Storage]:
        """Run an operation whose inputs and outputs are arrays in memory."""
        reads_slice = any(frame[value].is_slice for value in op.inputs)
        for i, value in enumerate(op.inputs):
            # Two kinds of inputs need not be stored, because they are fused with their reader: the
            # update of a dynamic_update_slice and, except on CPUs, the input of a reduction.
            is_fused = op.name == "dynamic_update_slice" and i == 1
            if not is_fused and (self.is_cpu or op.name not in REDUCTIONS):
                self.make(value, frame)
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
        if op.name in PRODUCTS and not self.is_cpu:
            has_epilogue = not frame.has_epilogue.isdisjoint(op.outputs)
            reads_slice &= not has_epilogue or self._is_reduced_over_devices(op)
            size = SLICED_WORKSPACE_BYTES if reads_slice else WORKSPACE_BYTES
            workspace = Value((size,), itemsize=1, on_host=False, axes=((),))
            self.memory.release(self.memory.allocate(workspace))
        self._count(op)
        self.done(frame, *op.inputs)
        return outputs

    def _is_reduced_over_devices(self, op: Operation) -> bool:
        """Return whether every device computes a part of a sum, which is reduced afterwards."""
        if op.name != "dot_general":
            return False
        (contracted, _), _ = op.params["dimension_numbers"]
        axes = [axis for dim in contracted for axis in op.inputs[0].axes[dim]]
        return any(self._mesh_shape[axis] > 1 for axis in axes)

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

    def done(self, frame: Frame, *values: Value) -> None:
        """Record that each of the values has been read once."""
        for value in values:
            frame.num_uses[value] -= 1
            if frame.num_uses[value] <= 0 and value in frame.storage:
                self.memory.release(frame.storage.pop(value))

    def unsplit_arrays(self, values: Iterable[Value], frame: Frame) -> dict[Value, Storage]:
        """Allocate the arrays without initial values that devices first hold as a whole.

        XLA splits zeros like the values that are written to them. But it allocates an array without
        values as a whole on every device, which then copies its own part:

            buffer = lax.empty(L, T, D)    [L, T, D]            all buffers of a loop
            its own part of it             [L, T/context, D]    one after another

        Args:
            values: inputs of a loop.
            frame: program's values.

        Returns:
            A value that is split -> its whole array, to be released when the value is made.
        """
        whole_arrays = {}
        for value in values:
            storage = frame[value]
            whole = dataclasses.replace(value, axes=((),) * len(value.shape))
            is_split = self.memory.size(whole) > self.memory.size(value)
            if storage.is_empty and is_split and not storage.is_made and value not in whole_arrays:
                whole_arrays[value] = self.memory.allocate(whole, storage.label)
        return whole_arrays

    def make(self, value: Value, frame: Frame, *, is_output: bool = False) -> Storage:
        """Store a value as an array in memory, and return its storage.

        A new value of a loop's carry is written to its place in the carry, if that is free. Other
        arrays are written over a buffer that they are computed from, if one has the same size and
        no other reader. Otherwise the array is newly allocated.

        Args:
            value: value, which may be part of a fusion so far.
            frame: program's values.
            is_output: whether it is an output of the whole step. Outputs are made together, each
                over an input if possible.
        """
        storage = frame[value]
        if storage.is_made:
            return storage
        size = self.memory.size(value)
        place = frame.places.get(value)
        array_storage = None
        if place is not None and (place.num_holders, place.num_bytes) == (0, size):
            array_storage = self.memory.allocate(value, storage.label, place)
        # Prefer its place, and then a buffer with few other readers; outputs of the step may take
        # one that has some.
        for buffer in sorted(storage.buffers, key=lambda b: (b is not place, b.num_holders)):
            is_same = (buffer.num_bytes, buffer.on_host) == (size, value.on_host)
            is_free = buffer.num_holders == 1 or is_output and not buffer.is_written_over
            if not self.is_cpu and not is_output and value in frame.is_reduced:
                is_free = False  # a fusion that also reduces its result writes over no input
            if value in frame.has_siblings:
                is_free = False  # nor does a fusion that has other results
            if array_storage is None and is_same and is_free and buffer not in storage.moved:
                array_storage = self.memory.retain(Storage((buffer,), is_made=True))
                is_read = buffer.is_read_at_end or buffer.num_holders > 2
                if self.is_cpu and is_output and is_read:
                    self.copied.append(buffer.num_bytes)
                buffer.is_written_over = is_output
            buffer.is_read_at_end |= is_output
        array_storage = array_storage or self.memory.allocate(value, storage.label)
        array_storage = dataclasses.replace(array_storage, is_slice=storage.is_slice)
        self.memory.release(storage)
        frame.storage[value] = array_storage
        return array_storage
