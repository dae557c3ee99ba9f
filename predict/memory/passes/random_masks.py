"""Masks of dropout, which XLA stores instead of the random bits that they are computed from.

The mask `random_bits(key) < rate` has a byte for each element, and the bits have four. Forward and
backward pass read it, and both could compute it from the bits. XLA computes random bits within the
fusion that reads them, so that this fusion stores the mask.
"""

from predict.memory.operations import STORED, Operation, Program, Value


def with_stored_masks(program: Program) -> Program:
    """Return a program that stores each result of random bits that is smaller than these."""
    sizes: dict[Value, int] = {}  # a result of random bits -> bytes of an element of the bits
    operations: list[Operation] = []
    for op in program.operations:
        operations.append(op)
        if op.name == "random_bits":
            sizes.update((value, value.itemsize) for value in op.outputs)
            continue
        read = [sizes[value] for value in op.inputs if value in sizes]
        if not read or op.bodies:
            continue
        for value in op.outputs:
            if value.itemsize < min(read):
                operations.append(Operation(STORED, [value], [], {"with": value}))
            else:
                sizes[value] = min(read)
    return Program(program.inputs, operations, program.outputs)
