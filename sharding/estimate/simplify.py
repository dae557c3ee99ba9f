"""What XLA's GPU compiler leaves out of a program before it plans memory.

Two things matter for memory. A value that is computed twice in one computation from the same inputs
is computed once and kept in between. So recomputation in a backward pass saves nothing where no
loop separates it from the forward: in a stack of one layer, whose loop XLA removes. And a write
that covers a whole buffer is no write: the value itself is read later.

    forward   h = x @ w         backward   h' = x @ w        one product: h is kept from the
              a = gelu(h)                  a' = gelu(h')     forward to the backward
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any

from sharding.estimate.operations import RENAMES, Operation, Program, Value

#: Never merged: they communicate, or are there to keep the compiler from merging.
_KEPT_APART = (
    *("all_gather", "psum", "reduce_scatter", "all_to_all", "ppermute", "pmax", "pmin"),
    *("optimization_barrier", "device_put"),
)
#: They return the array that they read.
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy")
_SAME = tuple(name for name in RENAMES if name != "optimization_barrier")


def simplified(program: Program) -> Program:
    """Returns the program without repeated operations and whole writes, in loops and branches too.

    The program that is passed is left as it is; what is not changed is shared.
    """
    replaced: dict[Value, Value] = {}
    identity: dict[Value, Hashable] = {}
    made: dict[Hashable, list[Value]] = {}
    operations = []

    def identity_of(value: Value) -> Hashable:
        if value.literal is not None:
            return (value.literal, value.shape, value.itemsize)
        return identity.get(value, value)

    for op in program.operations:
        inputs = [replaced.get(value, value) for value in op.inputs]
        op = _with(op, inputs=inputs, bodies=[simplified(body) for body in op.bodies])
        source = _source(op)
        if source is not None:
            op = Operation("copy", [source], op.outputs, {})
            identity[op.outputs[0]] = identity_of(source)
        elif op.name in (*_SAME, *_RESHAPES) and _is_view(op):
            for value, output in zip(op.inputs, op.outputs, strict=True):
                identity[output] = _reshaped(identity_of(value), value.shape, output.shape)
            if op.name in _RESHAPES:
                (output,) = op.outputs
                key = ("view", identity[output])
                if key in made:
                    replaced[output] = made[key][0]
                    continue
                made[key] = op.outputs
        elif not op.bodies and op.name not in _KEPT_APART:
            key = (op.name, _hashable(op.params), tuple(map(identity_of, inputs)))
            if key[1] is not None and key in made:
                replaced.update(zip(op.outputs, made[key], strict=True))
                continue
            made[key] = op.outputs
        operations.append(op)
    outputs = [replaced.get(value, value) for value in program.outputs]
    return Program(program.inputs, operations, outputs)


def _is_view(op: Operation) -> bool:
    pairs = zip(op.inputs, op.outputs, strict=False)
    is_one_to_one = len(op.inputs) == len(op.outputs)
    return is_one_to_one and all(math.prod(a.shape) == math.prod(b.shape) for a, b in pairs)


def _reshaped(identity: Hashable, before: tuple[int, ...], after: tuple[int, ...]) -> Hashable:
    """Returns the identity of an array after a reshape: one for each shape, however it came."""
    original, shape = identity, before
    if isinstance(identity, tuple) and identity[0] == "reshape":
        _, original, shape, _ = identity
    return original if after == shape else ("reshape", original, shape, after)


def _source(op: Operation) -> Value | None:
    """Returns the input that an operation returns whole, if it does nothing else."""
    if op.name == "dynamic_update_slice" and op.inputs[1].shape == op.outputs[0].shape:
        return op.inputs[1]
    if op.name == "dynamic_slice" and op.inputs[0].shape == op.outputs[0].shape:
        return op.inputs[0]
    return None


def _with(op: Operation, *, inputs: list[Value], bodies: list[Program]) -> Operation:
    if inputs == op.inputs and not bodies:
        return op
    fields = {name: getattr(op, name) for name in op.__dataclass_fields__}
    return type(op)(**{**fields, "inputs": inputs, "bodies": bodies})


def _hashable(params: Mapping[str, Any]) -> Hashable | None:
    """Returns the parameters as something that can be a key, None if they cannot."""
    key = tuple(sorted(params.items(), key=lambda item: item[0]))
    try:
        hash(key)
    except TypeError:
        return None
    return key
