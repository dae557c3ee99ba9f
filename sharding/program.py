"""A traced function as a list of operations with the bytes that each value takes on one device.

A jaxpr says what is computed and in which order, but not what XLA makes of it: arrays that the
compiler splits over the mesh show their whole shapes in it. Here calls are opened, and mesh axes
are passed on from inputs and constraints to what follows from them, much as XLA's own partitioner
does, so that the size of every value on one device is known before anything is compiled.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import PartitionSpec

from sharding.memory import HOST

#: Per dim of a value, the mesh axes that it is split over.
Axes = tuple[tuple[str, ...], ...]

#: Operations that give the same arrays other names.
RENAMES = ("name", "once", "optimization_barrier")
#: Operations whose inputs are split as their outputs are, where nothing else splits them.
_ALIKE = (
    *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "select_n"),
    *("convert_element_type", "psum", *RENAMES),
)
#: A loop's body is gone through until what it carries is split as what it gives out: in so few.
_MAX_ROUNDS = 4


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a traced function."""

    shape: tuple[int, ...]  # on this device along axes handled by hand; whole along the others
    itemsize: int
    on_host: bool
    axes: Axes  # that the compiler splits its dims over
    literal: str | None = None  # its value, of a scalar that the program itself holds

    def local_shape(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of what one device has of it."""
        parts = (math.prod(mesh_shape[axis] for axis in dim) for dim in self.axes)
        return tuple(-(-size // part) for size, part in zip(self.shape, parts, strict=True))

    def num_bytes(self, mesh_shape: Mapping[str, int]) -> int:
        """Returns the bytes that one device has of it."""
        return self.itemsize * math.prod(self.local_shape(mesh_shape))


@dataclasses.dataclass(eq=False)
class Operation:
    """One equation of a traced function; a loop or a branch has others within."""

    name: str  # of the primitive
    inputs: list[Value]
    outputs: list[Value]
    params: Mapping[str, Any]
    bodies: Sequence["Program"] = ()  # of a scan or while: one; of a cond: its branches


@dataclasses.dataclass(eq=False)
class Program:
    """A function of values: `inputs`, then what is done in order, then `outputs`."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]


@dataclasses.dataclass(eq=False)
class Loop(Operation):
    """A scan or while: the body's inputs are constants, what is carried, and slices."""

    num_consts: int = 0
    num_carry: int = 0
    trip_count: int = 1  # 1 where it is not known


def open_jaxpr(closed: ClosedJaxpr, args: Sequence[Any]) -> Program:
    """Returns the program of a traced function.

    Args:
      args: of the function: arrays or ShapeDtypeStructs with NamedShardings, one for each input.
    """
    inputs = [
        _value(v.aval, _axes_of(arg.sharding.spec, v.aval.ndim))
        for v, arg in zip(closed.jaxpr.invars, args, strict=True)
    ]
    program = _Builder(frozenset()).program(closed, inputs)
    for _ in range(_MAX_ROUNDS):
        _split_back(program.operations)
        if not _split_on(program.operations):
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


def _axes_of(spec: PartitionSpec, rank: int, without: frozenset[str] = frozenset()) -> Axes:
    parts = [p if isinstance(p, tuple) else (p,) if isinstance(p, str) else () for p in spec]
    parts += [()] * (rank - len(parts))
    return tuple(tuple(axis for axis in part if axis not in without) for part in parts)


class _Builder:
    """Opens a jaxpr.

    Args:
      manual: the mesh axes that are handled by hand there.
    """

    def __init__(self, manual: frozenset[str]):
        self._manual = manual

    def program(self, closed: Any, inputs: list[Value]) -> Program:
        operations: list[Operation] = []
        outputs = self.run(closed, inputs, operations)
        # What a loop begins with is split as what it carries: so is what only had another name.
        for operation in reversed(operations):
            if operation.name in RENAMES:
                for value, output in zip(operation.inputs, operation.outputs, strict=True):
                    if value.shape == output.shape:
                        _join([value], [output])
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
                    output.axes = _passed_on(operation, output, self._manual)
        operations.append(operation)
        return operation.outputs

    def _cond(self, eqn: Any, inputs: list) -> Operation:
        bodies = [self._body(branch, inputs[1:]) for branch in eqn.params["branches"]]
        outputs = [_value(v.aval) for v in eqn.outvars]
        for body in bodies:
            _join(outputs, body.outputs)
        for body in bodies:
            _join(body.outputs, outputs)
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
        _join(outputs[:num_carry], body.outputs[:num_carry])
        for output, made in zip(outputs[num_carry:], body.outputs[num_carry:], strict=True):
            output.axes = ((), *made.axes)
        _join(inputs[num_consts : num_consts + num_carry], outputs[:num_carry])
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
        _join(outputs, body.outputs)
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
            _join(body.inputs[carried], body.outputs[:num_carry])
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
        given = [_axes_of(spec, len(x.shape)) for x, spec in zip(inputs, eqn.params["in_specs"])]
        operations.append(Operation("shard_map", inputs, local, {"given": given}))
        inner = _Builder(frozenset(manual))
        made = inner.run(jaxpr, local, operations)
        outputs = []
        for v, value, spec in zip(eqn.outvars, made, eqn.params["out_specs"], strict=True):
            axes = _axes_of(spec, len(v.aval.shape))
            axes = tuple((*a, *b) for a, b in zip(axes, value.axes, strict=True))
            outputs.append(_value(v.aval, axes))
        operations.append(Operation("shard_map", made, outputs, {"manual": frozenset(manual)}))
        return outputs


def _split_back(operations: Sequence[Operation]) -> None:
    """Splits what operations read as what they give out, where nothing else says how.

    Gradients begin as zeros, and nothing in a step's forward and backward says how those of an
    embedding are split: the update does, which adds them to parameters that are.
    """
    for op in reversed(operations):
        if isinstance(op, Loop):
            (body,), carry = op.bodies, slice(op.num_consts, op.num_consts + op.num_carry)
            _join(body.outputs[: op.num_carry], op.outputs[: op.num_carry])
            _split_back(body.operations)
            _join(body.inputs[carry], body.outputs[: op.num_carry])
            _join(op.inputs[carry], body.inputs[carry])
        elif op.name == "cond":
            for body in op.bodies:
                _join(body.outputs, op.outputs)
                _split_back(body.operations)
                _join(op.inputs[1:], body.inputs)
        elif op.name == "shard_map":
            for i, (value, output) in enumerate(zip(op.inputs, op.outputs, strict=True)):
                if any(value.axes):
                    continue
                if "given" in op.params:  # the way in
                    value.axes = op.params["given"][i]
                else:
                    manual = op.params["manual"]
                    value.axes = tuple(
                        tuple(axis for axis in dim if axis not in manual) for dim in output.axes
                    )
        elif op.name in _ALIKE:
            for value, output in _alike(op):
                if not any(value.axes):
                    value.axes = output.axes
        elif op.name in ("scatter-add", "scatter"):
            _join(op.inputs[:1], op.outputs)


def _split_on(operations: Sequence[Operation]) -> bool:
    """Splits what operations give out as what they read; returns whether anything has changed."""
    has_changed = False
    for op in operations:
        before = [value.axes for value in op.outputs]
        if isinstance(op, Loop):
            (body,), carry = op.bodies, slice(op.num_consts, op.num_consts + op.num_carry)
            _join(body.inputs[: carry.stop], op.inputs[: carry.stop])
            has_changed |= _split_on(body.operations)
            _join(op.outputs[: op.num_carry], body.outputs[: op.num_carry])
            for output, made in zip(
                op.outputs[op.num_carry :], body.outputs[op.num_carry :], strict=True
            ):
                output.axes = _merged(output.axes, ((), *made.axes))
        elif op.name == "cond":
            for body in op.bodies:
                _join(body.inputs, op.inputs[1:])
                has_changed |= _split_on(body.operations)
                _join(op.outputs, body.outputs)
        elif op.name not in ("shard_map", "sharding_constraint", "once"):
            for output in op.outputs:
                output.axes = _merged(output.axes, _passed_on(op, output, frozenset()))
        has_changed |= before != [value.axes for value in op.outputs]
    return has_changed


def _alike(op: Operation) -> list[tuple[Value, Value]]:
    """Returns each input with the output that has its shape and its place."""
    outputs = op.outputs if len(op.outputs) == len(op.inputs) else op.outputs[:1] * len(op.inputs)
    pairs = zip(op.inputs, outputs, strict=True)
    return [(value, output) for value, output in pairs if value.shape == output.shape]


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


def _join(values: Sequence[Value], others: Sequence[Value]) -> None:
    """Splits the dims of `values` that are whole as those of the others are."""
    for value, other in zip(values, others, strict=True):
        value.axes = _merged(value.axes, other.axes)


def _merged(axes: Axes, others: Axes) -> Axes:
    """Returns `axes`, with those of `others` for dims that are whole; no axis splits two dims."""
    taken = {axis for dim in axes for axis in dim}
    merged = []
    for dim, other in zip(axes, others, strict=True):
        is_free = not dim and not taken.intersection(other)
        merged.append(other if is_free else dim)
        taken.update(merged[-1])
    return tuple(merged)


def _passed_on(operation: Operation, output: Value, manual: frozenset[str]) -> Axes:
    """Returns the axes that an output is split over, from those of the operation's inputs."""
    inputs, params, rank = operation.inputs, operation.params, len(output.shape)
    if operation.name == "sharding_constraint":
        return _constrained(params, inputs[0], manual)
    if not any(any(value.axes) for value in inputs):
        return output.axes
    first = inputs[0]
    match operation.name:
        case "dot_general":
            return _of_product(params["dimension_numbers"], *inputs)
        case "broadcast_in_dim":
            axes: list[tuple[str, ...]] = [()] * rank
            for dim, target in enumerate(params["broadcast_dimensions"]):
                if first.shape[dim] == output.shape[target]:
                    axes[target] = first.axes[dim]
            return tuple(axes)
        case "transpose":
            return tuple(first.axes[dim] for dim in params["permutation"])
        case "reshape" | "squeeze" | "expand_dims":
            return _reshaped(first, output.shape)
        case "gather":
            return _by_size(inputs, output)
        case "scatter-add" | "scatter":
            return _of_scatter(params["dimension_numbers"], *inputs)
    if operation.name.startswith(("reduce_", "arg")) and "axes" in params:
        return tuple(a for dim, a in enumerate(first.axes) if dim not in params["axes"])
    return _by_position(inputs, output)


def _constrained(params: Mapping, value: Value, manual: frozenset[str]) -> Axes:
    spec = getattr(params["sharding"], "spec", None)
    if spec is None:
        return value.axes
    axes = list(_axes_of(spec, len(value.shape), manual))
    for dim in params.get("unconstrained_dims") or ():
        axes[dim] = value.axes[dim]
    return tuple(axes)


def _of_product(dimension_numbers: Any, left: Value, right: Value) -> Axes:
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    batch = [
        a or b
        for a, b in zip(
            [left.axes[d] for d in left_batch], [right.axes[d] for d in right_batch], strict=True
        )
    ]
    free = [a for d, a in enumerate(left.axes) if d not in (*left_sum, *left_batch)]
    free += [a for d, a in enumerate(right.axes) if d not in (*right_sum, *right_batch)]
    taken: set[str] = set()
    axes = []
    for dim in (*batch, *free):
        axes.append(tuple(axis for axis in dim if axis not in taken))
        taken.update(dim)
    return tuple(axes)


def _reshaped(value: Value, shape: tuple[int, ...]) -> Axes:
    """Returns the axes after a reshape: a dim that is cut or joined is split in its first part."""
    axes: list[tuple[str, ...]] = [()] * len(shape)
    starts = {}
    done = 1
    for dim, size in enumerate(value.shape):
        if size > 1:
            starts[done] = value.axes[dim]
        done *= size
    done = 1
    for dim, size in enumerate(shape):
        if size > 1 and done in starts:
            axes[dim] = starts[done]
        done *= size
    return tuple(axes)


def _of_scatter(dimension_numbers: Any, operand: Value, _indices: Value, updates: Value) -> Axes:
    """Returns the operand's axes, and the updates' where they write all of a dim of it.

    So gradients that a loop adds to zeros are split as what is added: of `[L, D, F]`, which begins
    whole, D and F as in the `[D, F]` of a layer.
    """
    numbers = dimension_numbers
    outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [dim for dim in range(len(operand.shape)) if dim not in outside]
    axes: list[tuple[str, ...]] = [()] * len(operand.shape)
    for dim, place in zip(window, numbers.update_window_dims, strict=True):
        if operand.shape[dim] == updates.shape[place]:
            axes[dim] = updates.axes[place]
    return _merged(operand.axes, tuple(axes))


def _by_position(inputs: Sequence[Value], output: Value) -> Axes:
    """Returns each dim's axes from the inputs of that rank that have its size."""
    axes: list[tuple[str, ...]] = [()] * len(output.shape)
    for value in inputs:
        if len(value.shape) == len(axes):
            for dim, found in enumerate(value.axes):
                is_free = not axes[dim] and not any(set(found) & set(a) for a in axes)
                if is_free and value.shape[dim] == output.shape[dim]:
                    axes[dim] = found
    return tuple(axes)


def _by_size(inputs: Sequence[Value], output: Value) -> Axes:
    """Returns the axes of dims that keep their size, of the inputs in their order."""
    if len(inputs[0].shape) == len(output.shape):
        return _by_position(inputs[:1], output)
    axes: list[tuple[str, ...]] = [()] * len(output.shape)
    for value in inputs:
        for dim, found in enumerate(value.axes):
            places = [d for d, size in enumerate(output.shape) if size == value.shape[dim]]
            is_taken = any(set(found) & set(a) for a in axes)
            if found and places and not is_taken and not axes[places[-1]]:
                axes[places[-1]] = found
    return tuple(axes)
