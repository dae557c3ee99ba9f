"""Finds the slices that loops read by their counters, where the array is stored.

XLA lets a matrix product read such a slice in place:

    for i in range(num_layers):
        w = dynamic_slice(weights, i)     read in place, as the start follows from i alone
        r = dynamic_slice(residuals, s)   copied, if s is, for example, read from a table
        y = x @ w

In `chunk * layers_per_chunk + i` the chunk must be a constant, too. Nor is a slice read in place if
the whole array was all-gathered along another dim: then XLA stores that dim first, and the elements
of a slice are not contiguous.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from predict.memory.operations import RENAMES, Loop, Operation, Program, Value
from predict.memory.primitives import PRODUCTS, REDUCTIONS


def counted_slices(program: Program, mesh_shape: Mapping[str, int]) -> set[Value]:
    """Return the slices that loops of the program, at any depth, read in place.

    Args:
        mesh_shape: sizes of the mesh axes.
    """
    single = {axis for axis, size in mesh_shape.items() if size == 1}
    search = _Search(single)
    search.visit(program, counters=set())
    return search.found


@dataclasses.dataclass
class _Search:
    """Known properties of the values of a program and of its nested programs."""

    single: set[str]  # mesh axes with one device, on which an index is a constant
    found: set[Value] = dataclasses.field(default_factory=set)
    constants: set[Value] = dataclasses.field(default_factory=set)  # computed from literals
    gathered: set[Value] = dataclasses.field(default_factory=set)  # computed from all-gathers

    def visit(self, program: Program, counters: set[Value]) -> None:
        """Add the slices of a program, given the counters among its inputs."""
        for op in program.operations:
            if isinstance(op, Loop):
                body = op.bodies[0]
                self._enter(op.inputs[: op.num_consts], body.inputs)
                self.visit(body, set(_counters(op)))
            elif op.bodies:  # a branch is not a loop body, so its slices are copied
                for body in op.bodies:
                    self._enter(op.inputs[1:], body.inputs)
                    self.visit(body, set())
            elif op.name == "axis_index":
                if op.params["axis_name"] in self.single:
                    self.constants.update(op.outputs)
            elif op.name == "shard_map":  # devices may get different parts of a constant
                for value, output in zip(op.inputs, op.outputs, strict=True):
                    if value.shape == output.shape:
                        self._enter([value], [output])
            elif op.name == "dynamic_slice":
                self._slice(op, counters)
            else:
                self._compute(op, counters)

    def _enter(self, outer: Sequence[Value], inner: Sequence[Value]) -> None:
        for value, same in zip(outer, inner, strict=False):
            if self._is_constant(value):
                self.constants.add(same)
            if value in self.gathered:
                self.gathered.add(same)

    def _slice(self, op: Operation, counters: set[Value]) -> None:
        array, *starts = op.inputs
        # Along a dim of which all is read, XLA knows that the start is 0.
        sizes = zip(starts, array.shape, op.outputs[0].shape, strict=True)
        starts = [start for start, whole, part in sizes if whole != part]
        is_counted = not counters.isdisjoint(starts)
        is_known = all(start in counters or self._is_constant(start) for start in starts)
        if is_counted and is_known and array not in self.gathered:
            self.found.update(op.outputs)

    def _compute(self, op: Operation, counters: set[Value]) -> None:
        if op.name == "all_gather" and op.params["all_gather_dimension"] != 0:
            self.gathered.update(op.outputs)
        elif op.name not in (*PRODUCTS, *REDUCTIONS) and not self.gathered.isdisjoint(op.inputs):
            self.gathered.update(op.outputs)
        elif op.inputs and all(v in counters or self._is_constant(v) for v in op.inputs):
            known = self.constants if counters.isdisjoint(op.inputs) else counters
            known.update(op.outputs)

    def _is_constant(self, value: Value) -> bool:
        return value.literal is not None or value in self.constants


def _counters(loop: Loop) -> Iterable[Value]:
    """Return the values in the carry of a loop that grow by a constant in every iteration."""
    body = loop.bodies[0]
    made_by = {value: op for op in body.operations for value in op.outputs}
    for i in range(loop.num_carry):
        counter = body.inputs[loop.num_consts + i]
        op = made_by.get(body.outputs[i])
        while op is not None and op.name in RENAMES:
            op = made_by.get(op.inputs[0])
        if op is not None and op.name == "add" and counter in op.inputs:
            if any(value.literal is not None for value in op.inputs):
                yield counter
