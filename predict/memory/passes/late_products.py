"""Operations that XLA's GPU scheduler delays: products that nothing waits for, and transfers.

In a backward pass every product of the input gradient is waited for by the layer below. The product
of a weight gradient is not: it runs at the end of the loop over the layers, or after the loop, and
until then the values that it reads stay in memory. For a layer with two products

    forward   h = x @ w1,  a = gelu(h),  y = a @ w2

the backward in the order of the trace, and in the order in which it is scheduled, is

    traced    dw2 = a.T @ dy    da = dy @ w2.T    dh    dw1 = x.T @ dh    dx = dh @ w1.T
    run       da = dy @ w2.T    dh    dx = dh @ w1.T    dw2 = a.T @ dy    dw1 = x.T @ dh

so a and dh are in memory together. With a gate, a = silu(g) · u, and one fusion with three outputs
computes a, dg and du from g, u and da. So `a` is stored then, and until the end of the body three
arrays are in memory rather than five. Likewise, one fusion computes a = h · sigmoid(h) and dh, and
does not store the sigmoid. In the body of a loop this holds for all such products, and in unrolled
layers too, which barriers separate. Elsewhere it holds for gradients that are reduce-scattered, and
for those whose parameters are copied to host memory: the scheduler delays their products until the
transfer, which it overlaps with other work. With one microbatch, it holds for gradients of
parameters outside the stacks that are summed over devices. Before these sums and before copies to
host memory, the scheduler also delays the sums that are the gradients of biases and scales. All of
this was measured with the steps of docs/memory.md.
"""

import math
from collections.abc import Mapping

from predict.memory.operations import STORED, Operation, Program, Value
from predict.memory.passes.unrolled import layers_of
from predict.memory.primitives import COSTLY, KERNELS, MOVES, PRODUCTS, REDUCTIONS, UNFUSED, VIEWS


def with_late_products(program: Program, *, is_body: bool) -> Program:
    """Return a program whose late products, and everything that follows from them, come last.

    In a program with unrolled layers, they come last in each layer.

    Args:
        program: program. Programs within it are not changed.
        is_body: whether it is the body of a loop or branch, rather than the whole step.
    """
    operations = program.operations
    readers: dict[int, set[int]] = {}  # the number of an operation -> of those that read it
    made_by = {value: i for i, op in enumerate(operations) for value in op.outputs}
    for i, op in enumerate(operations):
        for value in op.inputs:
            if value in made_by:
                readers.setdefault(made_by[value], set()).add(i)

    def is_scatter(i: int) -> bool:
        # XLA turns a sum of which only a part is read into a reduce-scatter.
        is_part = any(operations[j].name == "dynamic_slice" for j in readers.get(i, ()))
        return operations[i].name == "reduce_scatter" or operations[i].name == "psum" and is_part

    is_awaited: dict[int, bool] = {}  # whether a product or kernel follows from the operation
    is_scattered: dict[int, bool] = {}  # whether a reduce-scatter does
    is_sent: dict[int, bool] = {}  # whether a copy to host memory does
    for i in reversed(range(len(operations))):
        following = readers.get(i, ())
        is_awaited[i] = any(is_awaited[j] or _has_product(operations[j]) for j in following)
        is_scattered[i] = any(is_scattered[j] or is_scatter(j) for j in following)
        is_sent[i] = any(is_sent[j] or _is_sent_to_host(operations[j]) for j in following)
    num_loops = _num_removed_loops(operations, readers)
    late: set[int] = set()
    ordered: list[Operation] = []
    stop = 0
    for part in layers_of(program):
        start = stop
        stop += len(part)
        is_layer = is_body or start > 0 and stop < len(operations)
        for i in range(start, stop):
            # The one removed loop is that over microbatches, not over layers or parts of the vocab.
            is_late = is_sent[i] or num_loops.get(i) == 1 and not is_layer
            if operations[i].name in PRODUCTS:
                is_late |= is_layer or is_scattered[i]
            else:
                is_late &= operations[i].name == "reduce_sum"
            if i in late or is_late and not is_awaited[i]:
                late.add(i)
                late |= readers.get(i, set())
        early = [operations[i] for i in range(start, stop) if i not in late]
        delayed = [operations[i] for i in range(start, stop) if i in late]
        ordered += _with_stored_operands(early, delayed) if is_layer else early
        ordered += delayed
    return Program(program.inputs, ordered, program.outputs)


def _num_removed_loops(
    operations: list[Operation], readers: Mapping[int, set[int]]
) -> dict[int, int]:
    """Return how many loops that XLA removes a gradient leaves before it is summed over devices.

    Args:
        readers: number of an operation -> numbers of the operations that read it.

    Returns:
        The number of an operation -> number of loops. Scalars, such as losses, are left out.
    """
    num_loops: dict[int, int] = {}
    for i in reversed(range(len(operations))):
        following = readers.get(i, ())
        counts = [num_loops[j] for j in following if j in num_loops]
        counts += [0 for j in following if operations[j].name == "psum"]
        if counts and any(value.shape for value in operations[i].outputs):
            num_loops[i] = max(counts) + (operations[i].name == "once")
    return num_loops


def _with_stored_operands(early: list[Operation], delayed: list[Operation]) -> list[Operation]:
    """Return the early operations, and among them those that store operands of late products.

    Only operands that are computed from several arrays, or by an expensive operation, are: storing
    them lets these arrays go. That is done by the last fusion of operations that read one of these
    arrays, whose result is the STORED operation's `with`.
    """
    operands = {value for op in delayed if op.name in PRODUCTS for value in op.inputs}
    operands -= {value for op in early if op.name in PRODUCTS for value in op.inputs}
    sources: dict[Value, frozenset[Value]] = {}  # an element-wise value -> its arrays
    is_costly: set[Value] = set()  # values that are too expensive to be computed twice
    last: dict[Value, int] = {}  # an operand -> the last operation of its fusion
    for i, op in enumerate(early):
        if not _is_element_wise(op):
            continue
        (output,) = op.outputs
        read = frozenset().union(*(sources.get(value, {value}) for value in op.inputs))
        sources[output] = frozenset(value for value in read if _size(value) == _size(output))
        if op.name in COSTLY or not is_costly.isdisjoint(op.inputs):
            is_costly.add(output)
        for operand in operands & sources.keys():
            shares_arrays = not sources[operand].isdisjoint(sources[output])
            is_other = operand is not output and _size(operand) == _size(output)
            if is_other and shares_arrays and (len(sources[operand]) > 1 or operand in is_costly):
                last[operand] = i
    stored: dict[int, list[Value]] = {}
    for operand, i in last.items():
        stored.setdefault(i, []).append(operand)
    operations = []
    for i, op in enumerate(early):
        if i in stored:
            operations.append(Operation(STORED, stored[i], [], {"with": op.outputs[0]}))
        operations.append(op)
    return operations


def values_sent_on(body: Program) -> list[Value]:
    """Return the inputs of reduce-scatters that a loop overlaps with its next iteration.

    XLA lets a transfer end in the next iteration if its result is only written into an array of the
    carry. Until then the value that is sent stays in memory.

    Args:
        body: body of the loop.
    """
    readers: dict[Value, list[Operation]] = {}
    for op in body.operations:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)

    def is_only_written(value: Value) -> bool:
        ops = readers.get(value, [])
        return bool(ops) and all(
            op.name == "dynamic_update_slice"
            and op.inputs[1] is value
            or op.name in (*VIEWS, "convert_element_type", "broadcast_in_dim")
            and all(map(is_only_written, op.outputs))
            for op in ops
        )

    return [
        op.inputs[0]
        for op in body.operations
        if op.name == "reduce_scatter" and is_only_written(op.outputs[0])
    ]


def _is_element_wise(op: Operation) -> bool:
    is_kernel = op.name in (*UNFUSED, *REDUCTIONS, *MOVES) or op.name.startswith(KERNELS)
    return not (is_kernel or op.bodies or op.name == "device_put") and len(op.outputs) == 1


def _size(value: Value) -> int:
    return math.prod(value.shape)


def _has_product(op: Operation) -> bool:
    return (
        op.name in PRODUCTS
        or op.name.startswith(KERNELS)
        or any(_has_product(inner) for body in op.bodies for inner in body.operations)
    )


def _is_sent_to_host(op: Operation) -> bool:
    return op.name == "device_put" and any(value.on_host for value in op.outputs)
