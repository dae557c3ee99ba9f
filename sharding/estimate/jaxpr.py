"""A traced function as a list of operations with the bytes that each value takes on one device.

A jaxpr says what is computed and in which order, but not what XLA makes of it: arrays that the
compiler splits over the mesh show their whole shapes in it. Here calls are opened, and mesh axes
are passed on from inputs and constraints to what follows from them, much as XLA's own partitioner
does, so that the size of every value on one device is known before anything is compiled.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from sharding.estimate.operations import RENAMES, Axes, Loop, Operation, Program, Value
from sharding.estimate.propagation import axes_of, join, passed_on, split_back, split_on
from sharding.memory import HOST

#: A loop's body is gone through until what it carries is split as what it gives out: in so few.
_MAX_ROUNDS = 4


def open_jaxpr(
    closed: ClosedJaxpr, args: Sequence[Any], *, splits_gradients: bool = True
) -> Program:
    """Returns the program of a traced function.

    Args:
      args: of the function: arrays or ShapeDtypeStructs with NamedShardings, one for each input.
      splits_gradients: whether buffers that begin as zeros are split as what is added to them.
        Every compiler does so. Estimates for CPUs leave it out: what is too much there makes up for
        copies that only these compilers make, and their share of gaps was measured so.
    """
    inputs = [
        _value(v.aval, axes_of(arg.sharding.spec, v.aval.ndim))
        for v, arg in zip(closed.jaxpr.invars, args, strict=True)
    ]
    program = _Builder(frozenset(), splits_gradients=splits_gradients).program(closed, inputs)
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
        itemsize = 8  # a key
    else:
        itemsize = np.dtype(dtype).itemsize
    on_host = getattr(aval, "memory_space", None) == HOST
    return Value(shape, itemsize, on_host, axes if axes is not None else ((),) * len(shape))


class _Builder:
    """Opens a jaxpr.

    Args:
      manual: the mesh axes that are handled by hand there.
      splits_gradients: as for open_jaxpr.
    """

    def __init__(self, manual: frozenset[str], *, splits_gradients: bool):
        self._manual, self._splits_gradients = manual, splits_gradients

    def program(self, closed: Any, inputs: list[Value]) -> Program:
        operations: list[Operation] = []
        outputs = self.run(closed, inputs, operations)
        # What a loop begins with is split as what it carries: so is what only had another name.
        for operation in reversed(operations):
            if operation.name in RENAMES:
                for value, output in zip(operation.inputs, operation.outputs, strict=True):
                    if value.shape == output.shape:
                        join([value], [output])
        return Program(inputs, _needed(operations, outputs), outputs)

    def run(self, closed: Any, inputs: Sequence[Value], operations: list) -> list:
        """Adds a jaxpr's operations; returns the values of its outputs."""
        jaxpr = _bare(closed)
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: _value(v.aval) for v in jaxpr.constvars}

        def read(v: Any) -> Value:
            if not isinstance(v, Literal):
                return env[v]
            value = _value(v.aval)
            value.literal = str(v.val) if not value.shape else None
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
            case _ if _called(eqn) is not None:
                return self.run(_called(eqn), inputs, operations)
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
        """Returns the program of a jaxpr whose inputs are like these values."""
        jaxpr = _bare(closed)
        inputs = [_value(v.aval, value.axes) for v, value in zip(jaxpr.invars, like, strict=True)]
        return self.program(closed, inputs)

    def _scan(self, eqn: Any, inputs: list) -> Loop:
        closed = eqn.params["jaxpr"]
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
        for output, made in zip(outputs[num_carry:], body.outputs[num_carry:], strict=True):
            output.axes = ((), *made.axes)
        join(inputs[num_consts : num_consts + num_carry], outputs[:num_carry])
        return Loop(
            *("scan", inputs, outputs, eqn.params, [body]),
            num_consts=num_consts,
            num_carry=num_carry,
            trip_count=eqn.params["length"],
        )

    def _once(self, eqn: Any, inputs: list, operations: list) -> list:
        """Adds the body of a scan of length 1, which XLA takes out of its loop."""
        jaxpr = eqn.params["jaxpr"].jaxpr
        like = [
            _value(v.aval, value.axes[len(value.shape) - v.aval.ndim :])
            for v, value in zip(jaxpr.invars, inputs, strict=True)
        ]
        operations.append(Operation("once", inputs, like, {}))
        made = self.run(eqn.params["jaxpr"], like, operations)
        outputs = []
        for v, value in zip(eqn.outvars, made, strict=True):
            axes = ((),) * (v.aval.ndim - len(value.shape)) + value.axes
            outputs.append(_value(v.aval, axes))
        operations.append(Operation("once", made, outputs, {}))
        return outputs

    def _while(self, eqn: Any, inputs: list) -> Loop:
        inputs = inputs[eqn.params["cond_nconsts"] :]
        num_consts = eqn.params["body_nconsts"]
        body = self._settled(eqn.params["body_jaxpr"], inputs, num_consts, len(inputs) - num_consts)
        outputs = [_value(v.aval) for v in eqn.outvars]
        join(outputs, body.outputs)
        return Loop(
            *("while", inputs, outputs, eqn.params, [body]),
            num_consts=num_consts,
            num_carry=len(outputs),
        )

    def _settled(self, closed: Any, like: list, num_consts: int, num_carry: int) -> Program:
        """Returns a loop's body with what is carried split alike at its start and its end."""
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
        jaxpr = _bare(eqn.params["jaxpr"])
        local = []
        for v, value in zip(jaxpr.invars, inputs, strict=True):
            kept = tuple(tuple(a for a in dim if a not in manual) for dim in value.axes)
            local.append(_value(v.aval, kept))
        specs = zip(inputs, eqn.params["in_specs"], strict=True)
        given = [axes_of(spec, len(value.shape)) for value, spec in specs]
        operations.append(Operation("shard_map", inputs, local, {"given": given}))
        inner = _Builder(frozenset(manual), splits_gradients=self._splits_gradients)
        made = inner.run(jaxpr, local, operations)
        outputs = []
        for v, value, spec in zip(eqn.outvars, made, eqn.params["out_specs"], strict=True):
            axes = axes_of(spec, len(v.aval.shape))
            axes = tuple((*a, *b) for a, b in zip(axes, value.axes, strict=True))
            outputs.append(_value(v.aval, axes))
        operations.append(Operation("shard_map", made, outputs, {"manual": frozenset(manual)}))
        return outputs


def _needed(operations: Sequence[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """Returns the operations that outputs depend on."""
    wanted, needed = set(outputs), []
    for operation in reversed(operations):
        if wanted.intersection(operation.outputs):
            needed.append(operation)
            wanted.update(operation.inputs)
    return needed[::-1]


def _called(eqn: Any) -> Any:
    """Returns the jaxpr that an equation only calls, or None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        jaxpr = _bare(eqn.params.get(key))
        if hasattr(jaxpr, "eqns") and _shapes(jaxpr) == _shapes(eqn):
            return jaxpr
    return None


def _bare(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _shapes(taker: Any) -> list[list[tuple]]:
    """Returns the shapes of what a jaxpr or an equation takes and gives out."""
    shape = lambda v: getattr(v.aval, "shape", ())  # noqa: E731
    return [list(map(shape, taker.invars)), list(map(shape, taker.outvars))]
