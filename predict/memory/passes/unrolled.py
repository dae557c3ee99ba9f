"""Communication of unrolled layers, which XLA overlaps with the layers next to them.

Barriers separate unrolled layers (pipeline/runtime/layers.py). XLA's GPU scheduler gathers the
parameters of a layer while the layer before it runs, and reduce-scatters its gradients while the
two layers after it run. In a backward, which begins with the last layer:

    traced    gather 3, compute 3, scatter 3, gather 2, compute 2, scatter 2, ...
    run       gather 3, gather 2, compute 3, gather 1, compute 2, compute 1, scatter 3, ...

So the parameters of two layers are in memory together, and the gradients of three, of which those
that are sent have been converted to the dtype of the reduction. The head's gradients are added to
the sums over microbatches before the layers run backward.
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
    if len(parts) > 1:
        _add_early(parts)
    return Program(program.inputs, [op for part in parts for op in part], program.outputs)


def _with_next_gathers(
    part: list[Operation], following: list[Operation]
) -> tuple[list[Operation], list[Operation]]:
    """Move the gathers of the following part, with all that they need, behind a part's barrier.

    Gathers that depend on the part or on a barrier of their layer stay: experts gather tokens, for
    example.
    """
    barrier = next((i for i, op in enumerate(part) if op.name == "optimization_barrier"), None)
    if barrier is None:  # the head, between the last layer and its backward
        return part, following
    waiting = {value for op in part[barrier + 1 :] for value in op.outputs}
    for op in following:
        if op.name == "optimization_barrier" or waiting.intersection(op.inputs):
            waiting.update(op.outputs)
    wanted: set[Value] = set()
    moved: list[Operation] = []
    for op in reversed(following):
        is_gather = op.name == "all_gather" and waiting.isdisjoint(op.outputs)
        if is_gather or wanted.intersection(op.outputs):
            moved.insert(0, op)
            wanted.update(op.inputs)
    left = [op for op in following if op not in moved]
    return [*part[: barrier + 1], *moved, *part[barrier + 1 :]], left


def _add_early(parts: list[list[Operation]]) -> None:
    """Move sums of the last part to the part that computes their terms, which are freed then.

    These are sums of gradients over microbatches, of the head for example.
    """
    made_in = {v: i for i, part in enumerate(parts) for op in part for v in op.outputs}
    last = parts.pop()
    left = []
    for op in last:
        number = max(made_in.get(value, 0) for value in op.inputs) if op.inputs else len(parts)
        if op.name in ("add", "add_any") and op.outputs[0].shape and number < len(parts):
            (total,) = op.outputs
            stored = dataclasses.replace(total)
            parts[number].append(dataclasses.replace(op, outputs=[stored]))
            parts[number].append(Operation("optimization_barrier", [stored], [total], {}))
        else:
            left.append(op)
    parts.append(left)


def _delay_scatters(parts: list[list[Operation]], number: int) -> None:
    """Move the reduce-scatters of a part, and the operations that read them, by two parts.

    Their inputs are stored in the part between. A reduce-scatter that earlier operations depend on
    stays: experts scatter their outputs, for example.
    """
    target = min(number + 2, len(parts) - 1)
    between = [*(op for part in parts[number + 1 : target] for op in part), parts[target][0]]
    needed = {value for op in between for value in op.inputs}
    is_awaited: set[Value] = set()  # values that operations before their new place depend on
    for op in reversed(parts[number]):
        if not needed.isdisjoint(op.outputs) or not is_awaited.isdisjoint(op.outputs):
            is_awaited.update(op.inputs, op.outputs)
    scattered: set[Value] = set()
    moved = []
    left = []
    sent: dict[Value, Value] = {}  # input of a reduce-scatter -> the same array, when it is stored
    for op in parts[number]:
        is_delayed = op.name == "reduce_scatter" and is_awaited.isdisjoint(op.outputs)
        if is_delayed:
            (value,) = op.inputs
            sent.setdefault(value, dataclasses.replace(value))
            op = dataclasses.replace(op, inputs=[sent[value]])
        if is_delayed or scattered.intersection(op.inputs):
            moved.append(op)
            scattered.update(op.outputs)
        else:
            left.append(op)
    parts[number] = left
    stored = Operation("optimization_barrier", [*sent], [*sent.values()], {})
    parts[target][1:1] = moved
    parts[number + 1].insert(1, stored)
