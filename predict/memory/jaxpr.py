"""Turns a traced function into a list of operations, with per-device sizes of all values.

A jaxpr lists the operations of a function in order, but its shapes are global wherever the compiler
partitions arrays over the mesh. `open_jaxpr` inlines calls, and propagates mesh axes from the
inputs and from sharding constraints to all other values, much as XLA's own partitioner does. So the
size of every value on one device is known before anything is compiled:

    value in the jaxpr      shape on the mesh     bytes on one device, with model=4
    x: f32[8,64]            [8, 64]               2,048
    w: f32[64,256]          [64, 256/model]       16,384 of 65,536
    y = dot_general x w     [8, 256/model]        2,048 of 8,192
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from predict.memory.operations import RENAMES, Loop, Operation, Program, Value
from predict.memory.propagation import join, passed_on, split_back, split_on
from sharding.memory import HOST
from sharding.spec import Axes, axes_by_dim, without

#: Maximum number of passes over a loop's body until its carry enters and leaves with equal axes.
_MAX_ROUNDS = 4


def open_jaxpr(
    closed: ClosedJaxpr, args: Sequence[Any], *, splits_gradients: bool = True
) -> Program:
    """Return the program of a traced function.

    Args:
        closed: function's jaxpr.
        args: function's arguments: arrays or ShapeDtypeStructs with NamedShardings, one per
            input of the jaxpr.
        splits_gradients: whether buffers that are initialized with zeros are split like the values
            added to them. Every compiler does this. Estimates for CPUs leave it out, because the
            excess makes up for copies that only CPU compilers make, and because `GAPS_SHARE` was
            measured this way.

    Returns:
        The program, whose values have the axes that the compiler splits them over.
    """
    inputs = [
        _value(v.aval, axes_by_dim(arg.sharding.spec, v.aval.ndim))
        for v, arg in zip(closed.jaxpr.invars, args, strict=True)
    ]
    program = _Builder(frozenset(), splits_gradients=splits_gradients).program(closed, inputs)
    # Backward passes find axes that forward passes propagate further, and the other way round.
    for _ in range(_MAX_ROUNDS if splits_gradients else 0):
        split_back(program.operations)
        if not split_on(program.operations):
            break
    return program


def _value(aval: Any, axes: Axes | None = None) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        itemsize = 0
    elif jnp.issubdtype(dtype, jax.dtypes.extended):
        itemsize = 8  # a PRNG key
    else:
        itemsize = np.dtype(dtype).itemsize
    on_host = getattr(aval, "memory_space", None) == HOST
    return Value(shape, itemsize, on_host, axes if axes is not None else ((),) * len(shape))


class _Builder:
    """Inlines a jaxpr and propagates axes forward.

    Args:
        manual: mesh axes that are manual in this jaxpr, in a `shard_map`.
        splits_gradients: as in `open_jaxpr`.
    """

    def __init__(self, manual: frozenset[str], *, splits_gradients: bool):
        self._manual = manual
        self._splits_gradients = splits_gradients

    def program(self, closed: Any, inputs: list[Value]) -> Program:
        operations: list[Operation] = []
        outputs = self.run(closed, inputs, operations)
        # A loop's initial values have the axes of its carry. Pass them back through renames.
        for operation in reversed(operations):
            if operation.name in RENAMES:
                for value, output in zip(operation.inputs, operation.outputs, strict=True):
                    if value.shape == output.shape:
                        join([value], [output])
        return Program(inputs, _needed_operations(operations, outputs), outputs)

    def run(self, closed: Any, inputs: Sequence[Value], operations: list) -> list:
        """Append the operations of a jaxpr, and return the values of its outputs."""
        jaxpr = _bare(closed)
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: _value(v.aval) for v in jaxpr.constvars}
        for v, constant in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False):
            env[v].literal = _literal(constant)

        def read(v: Any) -> Value:
            if not isinstance(v, Literal):
                return env[v]
            value = _value(v.aval)
            value.literal = _literal(v.val)
            return value

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [read(v) for v in eqn.invars], operations)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list, operations: list) -> list:
        name = eqn.primitive.name
        if name == "shard_map":
            return self._shard_map(eqn, inputs, operations)
        if name == "scan" and eqn.params["length"] == 1:
            return self._once(eqn, inputs, operations)
        match name:
            case "scan":
                operation = self._scan(eqn, inputs)
            case "while":
                operation = self._while(eqn, inputs)
            case "cond":
                operation = self._cond(eqn, inputs)
            case _ if _called_jaxpr(eqn) is not None:
                return self.run(_called_jaxpr(eqn), inputs, operations)
            case _:
                outputs = [_value(v.aval) for v in eqn.outvars]
                operation = Operation(name, inputs, outputs, eqn.params)
                for output in outputs:
                    if name == "scatter-add" and not self._splits_gradients:
                        output.axes = inputs[0].axes
                    else:
                        output.axes = passed_on(operation, output, self._manual)
        operations.append(operation)
        return operation.outputs

    def _cond(self, eqn: Any, inputs: list) -> Operation:
        bodies = [self._body(branch, inputs[1:]) for branch in eqn.params["branches"]]
        outputs = [_value(v.aval) for v in eqn.outvars]
        for body in bodies:
            join(outputs, body.outputs)
        for body in bodies:
            join(body.outputs, outputs)
        return Operation("cond", inputs, outputs, eqn.params, bodies)

    def _body(self, closed: Any, like: Sequence[Value]) -> Program:
        """Return the program of a jaxpr whose inputs have the axes of these values."""
        jaxpr = _bare(closed)
        inputs = [_value(v.aval, value.axes) for v, value in zip(jaxpr.invars, like, strict=True)]
        return self.program(closed, inputs)

    def _scan(self, eqn: Any, inputs: list) -> Loop:
        closed = eqn.params["jaxpr"]
        # An input is scanned over if the body sees it with one dim fewer; likewise, an output is
        # stacked if it has one dim more than the body's output. The others are constants or carry.
        ranks = [len(v.aval.shape) for v in closed.jaxpr.invars]
        is_slice = [len(v.aval.shape) > rank for v, rank in zip(eqn.invars, ranks, strict=True)]
        out_ranks = [len(v.aval.shape) for v in closed.jaxpr.outvars]
        is_carry = [
            len(v.aval.shape) == rank for v, rank in zip(eqn.outvars, out_ranks, strict=True)
        ]
        num_carry = sum(is_carry)
        num_consts = len(inputs) - sum(is_slice) - num_carry
        outputs = [_value(v.aval) for v in eqn.outvars]
        like = [
            _value(v.aval.update(shape=v.aval.shape[1:]), value.axes[1:]) if is_slice else value
            for v, value, is_slice in zip(eqn.invars, inputs, is_slice, strict=True)
        ]
        body = self._settled(closed, like, num_consts, num_carry)
        join(outputs[:num_carry], body.outputs[:num_carry])
        for output, body_output in zip(outputs[num_carry:], body.outputs[num_carry:], strict=True):
            output.axes = ((), *body_output.axes)
        join(inputs[num_consts : num_consts + num_carry], outputs[:num_carry])
        return Loop(
            "scan",
            inputs,
            outputs,
            eqn.params,
            [body],
            num_consts=num_consts,
            num_carry=num_carry,
            trip_count=eqn.params["length"],
        )

    def _once(self, eqn: Any, inputs: list, operations: list) -> list:
        """Append the body of a scan of length 1, whose loop XLA removes."""
        jaxpr = eqn.params["jaxpr"].jaxpr
        like = [
            _value(v.aval, value.axes[len(value.shape) - v.aval.ndim :])
            for v, value in zip(jaxpr.invars, inputs, strict=True)
        ]
        operations += _split_by_value(inputs, like)
        body_outputs = self.run(eqn.params["jaxpr"], like, operations)
        outputs = []
        for v, value in zip(eqn.outvars, body_outputs, strict=True):
            axes = ((),) * (v.aval.ndim - len(value.shape)) + value.axes
            outputs.append(_value(v.aval, axes))
        operations += _split_by_value(body_outputs, outputs)
        return outputs

    def _while(self, eqn: Any, inputs: list) -> Loop:
        # The body does not read the constants of the condition.
        inputs = inputs[eqn.params["cond_nconsts"] :]
        num_consts = eqn.params["body_nconsts"]
        body = self._settled(eqn.params["body_jaxpr"], inputs, num_consts, len(inputs) - num_consts)
        outputs = [_value(v.aval) for v in eqn.outvars]
        join(outputs, body.outputs)
        return Loop(
            "while",
            inputs,
            outputs,
            eqn.params,
            [body],
            num_consts=num_consts,
            num_carry=len(outputs),
        )

    def _settled(self, closed: Any, like: list, num_consts: int, num_carry: int) -> Program:
        """Return a loop's body whose carry has the same axes at its start and at its end."""
        carried = slice(num_consts, num_consts + num_carry)
        for _ in range(_MAX_ROUNDS):
            body = self._body(closed, like)
            before = [value.axes for value in body.inputs[carried]]
            join(body.inputs[carried], body.outputs[:num_carry])
            if before == [value.axes for value in body.inputs[carried]]:
                break
            like = [*like[:num_consts], *body.inputs[carried], *like[carried.stop :]]
        return body

    def _shard_map(self, eqn: Any, inputs: list, operations: list) -> list:
        manual = self._manual | set(
            eqn.params.get("manual_axes") or eqn.params["newly_manual_axes"]
        )
        # Inside, shapes are per device along manual axes, so only the other axes remain.
        jaxpr = _bare(eqn.params["jaxpr"])
        local = []
        for v, value in zip(jaxpr.invars, inputs, strict=True):
            local.append(_value(v.aval, without(value.axes, manual)))
        specs = zip(inputs, eqn.params["in_specs"], strict=True)
        input_axes = [axes_by_dim(spec, len(value.shape)) for value, spec in specs]
        operations.append(Operation("shard_map", inputs, local, {"given": input_axes}))
        inner = _Builder(frozenset(manual), splits_gradients=self._splits_gradients)
        local_outputs = inner.run(jaxpr, local, operations)
        outputs = []
        for v, value, spec in zip(eqn.outvars, local_outputs, eqn.params["out_specs"], strict=True):
            axes = axes_by_dim(spec, len(v.aval.shape))
            axes = tuple((*a, *b) for a, b in zip(axes, value.axes, strict=True))
            outputs.append(_value(v.aval, axes))
        operations.append(
            Operation("shard_map", local_outputs, outputs, {"manual": frozenset(manual)})
        )
        return outputs


def _literal(constant: Any) -> str | None:
    """Return a text that equal constants share, or None for constants that are not compared."""
    if not isinstance(constant, np.ndarray | np.generic | int | float | bool):
        return None
    array = np.asarray(constant)
    if not array.shape:
        return repr(array.astype(np.float64).item()) if array.dtype.kind in "biuf" else str(array)
    return hashlib.sha256(array.tobytes()).hexdigest()


def _split_by_value(values: Sequence[Value], others: Sequence[Value]) -> list[Operation]:
    """Return one operation per value, so that none of them waits for another."""
    pairs = zip(values, others, strict=True)
    return [Operation("once", [value], [other], {}) for value, other in pairs]


def _needed_operations(
    operations: Sequence[Operation], outputs: Sequence[Value]
) -> list[Operation]:
    """Return the operations that the outputs depend on."""
    wanted = set(outputs)
    needed = []
    for operation in reversed(operations):
        if wanted.intersection(operation.outputs):
            needed.append(operation)
            wanted.update(operation.inputs)
    return needed[::-1]


def _called_jaxpr(eqn: Any) -> Any:
    """Return the jaxpr that an equation merely calls, as `jit` does, or None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        jaxpr = _bare(eqn.params.get(key))
        if hasattr(jaxpr, "eqns") and _shapes(jaxpr) == _shapes(eqn):
            return jaxpr
    return None


def _bare(jaxpr: Any) -> Any:
    """Return a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _shapes(taker: Any) -> list[list[tuple]]:
    """Return the shapes of the inputs and of the outputs of a jaxpr or an equation."""

    def shape(v):
        return getattr(v.aval, "shape", ())

    return [list(map(shape, taker.invars)), list(map(shape, taker.outvars))]
