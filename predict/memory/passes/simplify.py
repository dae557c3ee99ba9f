"""Applies the simplifications of XLA's GPU compiler that change how much memory a program takes.

There are two. First, a value that is computed twice from the same inputs, within one computation,
is computed once and kept in between. So recomputation in a backward pass saves nothing unless a
loop separates it from the forward pass, as in a stack of one layer, whose loop XLA removes:

    forward   h = x @ w         backward   h' = x @ w        one product: h is kept from the
              a = gelu(h)                  a' = gelu(h')     forward to the backward

Equal constants count as the same input. Second, slicing or overwriting a whole buffer copies
nothing: readers use the value itself.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from predict.memory.operations import RENAMES, Operation, Program, Value
from predict.memory.primitives import COLLECTIVES

#: Never merged: collectives, allocations of arrays without values, and operations whose purpose is
#: to prevent merging.
_KEPT_APART = (*COLLECTIVES, "empty", "optimization_barrier", "device_put")
#: These return the array that they read, in the same or another shape.
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy")
_SAME = tuple(name for name in RENAMES if name != "optimization_barrier")


@dataclasses.dataclass(frozen=True)
class Constant:
    """Identity of a constant of the program."""

    literal: str
    shape: tuple[int, ...]
    itemsize: int


def simplify(program: Program) -> Program:
    """Remove repeated operations and writes of whole buffers, also in loops and branches.

    The given program is not modified; the result shares its unchanged parts.
    """
    replaced: dict[Value, Value] = {}  # output of a removed operation -> the equal value kept
    identity: dict[Value, Hashable] = {}  # equal for values that are equal up to renames
    known_outputs: dict[Hashable, list[Value]] = {}  # identity of an operation -> its outputs
    operations = []

    def identity_of(value: Value) -> Hashable:
        if value.literal is not None:
            return Constant(value.literal, value.shape, value.itemsize)
        return identity.get(value, value)

    for op in program.operations:
        inputs = [replaced.get(value, value) for value in op.inputs]
        op = _with(op, inputs=inputs, bodies=[simplify(body) for body in op.bodies])
        source = _source(op)
        constants = _constants(op, identity_of)
        if constants is not None:
            identity.update(constants)
        elif source is not None:
            op = Operation("copy", [source], op.outputs, {})
            identity[op.outputs[0]] = identity_of(source)
        elif op.name in (*_SAME, *_RESHAPES) and _is_view(op):
            if op.name == "broadcast_in_dim":  # it only adds dims of size 1
                op = Operation("expand_dims", op.inputs, op.outputs, {})
            for value, output in zip(op.inputs, op.outputs, strict=True):
                identity[output] = _identity_of_reshaped(
                    identity_of(value), value.shape, output.shape
                )
            if op.name in _RESHAPES:
                (output,) = op.outputs
                key = ("view", identity[output])
                if key in known_outputs:
                    replaced[output] = known_outputs[key][0]
                    continue
                known_outputs[key] = op.outputs
        elif not op.bodies and op.name not in _KEPT_APART:
            key = (op.name, _hashable(op.params), tuple(map(identity_of, inputs)))
            if key[1] is not None and key in known_outputs:
                replaced.update(zip(op.outputs, known_outputs[key], strict=True))
                continue
            known_outputs[key] = op.outputs
        operations.append(op)
    outputs = [replaced.get(value, value) for value in program.outputs]
    return Program(program.inputs, operations, outputs)


def _constants(
    op: Operation, identity_of: Callable[[Value], Hashable]
) -> dict[Value, Hashable] | None:
    """Return the identities of outputs that are constants, or None if the operation has none.

    Constants enter a `shard_map` as its inputs, and may be converted to another type.
    """
    if op.name not in ("shard_map", "convert_element_type"):
        return None
    identities: dict[Value, Hashable] = {}
    for value, output in zip(op.inputs, op.outputs, strict=True):
        identity = identity_of(value)
        if isinstance(identity, Constant) and value.shape == output.shape:
            identities[output] = dataclasses.replace(identity, itemsize=output.itemsize)
    return identities or None


def _is_view(op: Operation) -> bool:
    pairs = zip(op.inputs, op.outputs, strict=False)
    is_one_to_one = len(op.inputs) == len(op.outputs)
    return is_one_to_one and all(math.prod(a.shape) == math.prod(b.shape) for a, b in pairs)


def _identity_of_reshaped(
    identity: Hashable, before: tuple[int, ...], after: tuple[int, ...]
) -> Hashable:
    """Return the identity of a reshaped array, which depends on its final shape only."""
    original = identity
    shape = before
    if isinstance(identity, tuple) and identity[0] == "reshape":
        _, original, shape, _ = identity
    return original if after == shape else ("reshape", original, shape, after)


def _source(op: Operation) -> Value | None:
    """Return the input that an operation returns unchanged, or None if it does anything else."""
    if op.name == "dynamic_update_slice" and op.inputs[1].shape == op.outputs[0].shape:
        return op.inputs[1]
    if op.name == "dynamic_slice" and op.inputs[0].shape == op.outputs[0].shape:
        return op.inputs[0]
    if op.name == "reduce_precision":  # jax adds it to residuals, in the precision of their dtype
        bits = 1 + op.params["exponent_bits"] + op.params["mantissa_bits"]
        return op.inputs[0] if bits == 8 * op.inputs[0].itemsize else None
    return None


def _with(op: Operation, *, inputs: list[Value], bodies: list[Program]) -> Operation:
    if inputs == op.inputs and not bodies:
        return op
    return dataclasses.replace(op, inputs=inputs, bodies=bodies)


def _hashable(params: Mapping[str, Any]) -> Hashable | None:
    """Return parameters as a dictionary key, or None if they are not hashable."""
    key = tuple(sorted(params.items(), key=lambda item: item[0]))
    try:
        hash(key)
    except TypeError:
        return None
    return key
