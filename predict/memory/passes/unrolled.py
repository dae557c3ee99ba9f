"""Communication of unrolled layers, which XLA overlaps with the layers next to them.

Barriers separate unrolled layers (pipeline/runtime/layers.py). XLA's GPU scheduler gathers the
parameters of a layer while the layer before it runs, and reduce-scatters its gradients while the
two layers after it run. In a backward, which begins with the last layer:

    traced    gather 3, compute 3, scatter 3, gather 2, compute 2, scatter 2, ...
    run       gather 3, gather 2, compute 3, gather 1, compute 2, compute 1, scatter 3, ...

So the parameters of two layers are in memory together, and the gradients of three, of which those
that are sent have been converted to the dtype of the reduction.
"""

import dataclasses

from predict.memory.operations import Operation, Program, Value
from sharding.labels import LAYER


def layers_of(program: Program) -> list[list[Operation]]:
    """Return the operations of a program in parts, between which unrolled layers begin and end.

    A program without unrolled layers has one part.
    """
    parts: list[list[Operation]] = [[]]
    for op in program.operations:
        if op.name == "name" and op.params["name"] == LAYER:
            parts.append([])
        parts[-1].append(op)
    return parts


def with_overlapped_layers(program: Program) -> Program:
    """Return a program whose unrolled layers communicate during their neighbours."""
    parts = layers_of(program)
    for i in range(1, len(parts) - 2):
        parts[i], parts[i + 1] = _with_next_gathers(parts[i], parts[i + 1])
    for i in reversed(range(1, len(parts) - 1)):
        _delay_scatters(parts, i)
    return Program(program.inputs, [op for part in parts for op in part], program.outputs)


def _with_next_gathers(
    part: list[Operation], following: list[Operation]
) -> tuple[list[Operation], list[Operation]]:
    """Move the gathers of the following part, with all that they need, behind a part's barrier."""
    wanted: set[Value] = set()
    moved: list[Operation] = []
    for op in reversed(following):
        if op.name == "all_gather" or wanted.intersection(op.outputs):
            if op.name == "optimization_barrier":  # they depend on the layer itself
                return part, following
            moved.insert(0, op)
            wanted.update(op.inputs)
    barrier = next((i for i, op in enumerate(part) if op.name == "optimization_barrier"), None)
    if barrier is None:  # the head, between the last layer and its backward
        return part, following
    left = [op for op in following if op not in moved]
    return [*part[: barrier + 1], *moved, *part[barrier + 1 :]], left


def _delay_scatters(parts: list[list[Operation]], number: int) -> None:
    """Move the reduce-scatters of a part, and the operations that read them, by two parts.

    Their inputs are stored in the part between.
    """
    scattered: set[Value] = set()
    moved = []
    left = []
    sent: dict[Value, Value] = {}  # input of a reduce-scatter -> the same array, when it is stored
    for op in parts[number]:
        if op.name == "reduce_scatter":
            (value,) = op.inputs
            sent[value] = dataclasses.replace(value)
            op = dataclasses.replace(op, inputs=[sent[value]])
        if op.name == "reduce_scatter" or scattered.intersection(op.inputs):
            moved.append(op)
            scattered.update(op.outputs)
        else:
            left.append(op)
    parts[number] = left
    stored = Operation("optimization_barrier", [*sent], [*sent.values()], {})
    parts[min(number + 2, len(parts) - 1)][1:1] = moved
    parts[number + 1].insert(1, stored)
