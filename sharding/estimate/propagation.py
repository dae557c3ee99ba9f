"""How the compiler splits arrays over the mesh, followed from operation to operation.

Of a step the inputs' axes are known, and constraints. The rest follows, much as in XLA's own
partitioner: forward, an output is split as what it is computed from; and backward, what begins as
zeros is split as what it is added to.

    x [B, D]   up [D, F/model]   ->   x @ up   [B, F/model]
    zeros [L, D, F]   .at[i].add(gradient [D, F/model])   ->   [L, D, F/model], the zeros too
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from sharding.estimate.operations import RENAMES, Axes, Loop, Operation, Value

#: Operations whose inputs are split as their outputs are, where nothing else splits them.
_ALIKE = (
    *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "select_n"),
    *("convert_element_type", "psum", *RENAMES),
)


def axes_of(spec: PartitionSpec, rank: int, without: frozenset[str] = frozenset()) -> Axes:
    parts = [p if isinstance(p, tuple) else (p,) if isinstance(p, str) else () for p in spec]
    parts += [()] * (rank - len(parts))
    return tuple(tuple(axis for axis in part if axis not in without) for part in parts)


def split_back(operations: Sequence[Operation]) -> None:
    """Splits what operations read as what they give out, where nothing else says how.

    Gradients begin as zeros, and nothing in a step's forward and backward says how those of an
    embedding are split: the update does, which adds them to parameters that are.
    """
    for op in reversed(operations):
        if isinstance(op, Loop):
            (body,), carry = op.bodies, slice(op.num_consts, op.num_consts + op.num_carry)
            join(body.outputs[: op.num_carry], op.outputs[: op.num_carry])
            split_back(body.operations)
            join(body.inputs[carry], body.outputs[: op.num_carry])
            join(op.inputs[carry], body.inputs[carry])
        elif op.name == "cond":
            for body in op.bodies:
                join(body.outputs, op.outputs)
                split_back(body.operations)
                join(op.inputs[1:], body.inputs)
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
            join(op.inputs[:1], op.outputs)


def split_on(operations: Sequence[Operation]) -> bool:
    """Splits what operations give out as what they read; returns whether anything has changed."""
    has_changed = False
    for op in operations:
        before = [value.axes for value in op.outputs]
        if isinstance(op, Loop):
            (body,), carry = op.bodies, slice(op.num_consts, op.num_consts + op.num_carry)
            join(body.inputs[: carry.stop], op.inputs[: carry.stop])
            has_changed |= split_on(body.operations)
            join(op.outputs[: op.num_carry], body.outputs[: op.num_carry])
            for output, made in zip(
                op.outputs[op.num_carry :], body.outputs[op.num_carry :], strict=True
            ):
                output.axes = _merged(output.axes, ((), *made.axes))
        elif op.name == "cond":
            for body in op.bodies:
                join(body.inputs, op.inputs[1:])
                has_changed |= split_on(body.operations)
                join(op.outputs, body.outputs)
        elif op.name not in ("shard_map", "sharding_constraint", "once"):
            for output in op.outputs:
                output.axes = _merged(output.axes, passed_on(op, output, frozenset()))
        has_changed |= before != [value.axes for value in op.outputs]
    return has_changed


def _alike(op: Operation) -> list[tuple[Value, Value]]:
    """Returns each input with the output that has its shape and its place."""
    outputs = op.outputs if len(op.outputs) == len(op.inputs) else op.outputs[:1] * len(op.inputs)
    pairs = zip(op.inputs, outputs, strict=True)
    return [(value, output) for value, output in pairs if value.shape == output.shape]


def join(values: Sequence[Value], others: Sequence[Value]) -> None:
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


def passed_on(operation: Operation, output: Value, manual: frozenset[str]) -> Axes:
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
    axes = list(axes_of(spec, len(value.shape), manual))
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
