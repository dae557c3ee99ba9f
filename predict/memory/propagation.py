"""Predicts how the compiler splits arrays over the mesh, one operation at a time.

The axes of a step's inputs are known, and so are sharding constraints. The axes of all other values
follow from these, much as in XLA's own partitioner. Forward, an output is split like the values
that it is computed from. Backward, a buffer that is initialized with zeros is split like the values
that are added to it:

    x [B, D]   up [D, F/model]   ->   x @ up   [B, F/model]
    zeros [L, D, F]   .at[i].add(gradient [D, F/model])   ->   [L, D, F/model], the zeros too

Functions that update axes in place may split a dim over further axes, but never over fewer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from predict.memory.operations import RENAMES, Loop, Operation, Value
from sharding.spec import Axes, axes_by_dim, without

#: Operations whose inputs are split like their outputs, unless something else splits them.
_ALIKE = (
    "add",
    "add_any",
    "sub",
    "mul",
    "div",
    "neg",
    "max",
    "min",
    "select_n",
    "convert_element_type",
    "psum",
    *RENAMES,
)
#: Operations that only give another shape to their first input.
_MOVES = ("reshape", "broadcast_in_dim", "expand_dims", "squeeze", *RENAMES)


def split_back(operations: Sequence[Operation]) -> None:
    """Propagate axes backward, from outputs to those inputs whose axes are not known.

    Gradients are initialized with zeros, and nothing in a step's forward and backward pass says how
    the gradients of an embedding are split. Only the optimizer update does: it combines them with
    parameters whose axes are known.
    """
    for op in reversed(operations):
        if isinstance(op, Loop):
            (body,) = op.bodies
            carry = slice(op.num_consts, op.num_consts + op.num_carry)
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
                if "given" in op.params:  # the inputs of the shard_map, rather than its outputs
                    value.axes = op.params["given"][i]
                else:
                    manual = op.params["manual"]
                    value.axes = without(output.axes, manual)
        elif op.name in _ALIKE:
            for value, output in _alike(op):
                if not any(value.axes):
                    value.axes = output.axes
        elif op.name in ("scatter-add", "scatter"):
            join(op.inputs[:1], op.outputs)


def split_on(operations: Sequence[Operation]) -> bool:
    """Propagate axes forward, from inputs to outputs, and return whether anything changed."""
    has_changed = False
    for op in operations:
        before = [value.axes for value in op.outputs]
        if isinstance(op, Loop):
            (body,) = op.bodies
            carry = slice(op.num_consts, op.num_consts + op.num_carry)
            join(body.inputs[: carry.stop], op.inputs[: carry.stop])
            has_changed |= split_on(body.operations)
            join(op.outputs[: op.num_carry], body.outputs[: op.num_carry])
            for output, body_output in zip(
                op.outputs[op.num_carry :], body.outputs[op.num_carry :], strict=True
            ):
                output.axes = _merge_axes(output.axes, ((), *body_output.axes))
        elif op.name == "cond":
            for body in op.bodies:
                join(body.inputs, op.inputs[1:])
                has_changed |= split_on(body.operations)
                join(op.outputs, body.outputs)
        elif op.name not in ("shard_map", "sharding_constraint", "once"):
            for output in op.outputs:
                output.axes = _merge_axes(output.axes, passed_on(op, output, frozenset()))
        has_changed |= before != [value.axes for value in op.outputs]
    return _split_saved(operations) or has_changed


def _split_saved(operations: Sequence[Operation]) -> bool:
    """Split buffers like the constraints that their values get, and return whether any changed.

    The output of a product may be a sum over devices, which a constraint then splits. If it is
    saved for the backward pass, the saved array is split, too:

        x @ w [B, T, D]  --save-->  .at[i].set  [L, B, T, D/model]
                         --constraint over model-->  [B, T, D/model]
    """
    has_changed = False
    made_by = {id(output): op for op in operations for output in op.outputs}
    for op in operations:
        if op.name != "dynamic_update_slice":
            continue
        (buffer,) = op.outputs
        value = update = op.inputs[1]
        while (before := made_by.get(id(value))) is not None and before.name in _MOVES:
            value = before.inputs[0]
        if value.size == update.size:
            axes = _axes_after_reshape(_constrained_later(operations, value), update.shape)
            is_whole = [a == b for a, b in zip(update.shape, buffer.shape, strict=True)]
            axes = tuple(dim if same else () for dim, same in zip(axes, is_whole, strict=True))
            merged = _merge_axes(buffer.axes, axes)
            has_changed |= merged != buffer.axes
            buffer.axes = merged
    return has_changed


def _constrained_later(operations: Sequence[Operation], value: Value) -> Value:
    """Return a value with the axes of the constraint that it gets; unchanged without one."""
    current = value
    for op in operations:
        if not any(current is each for each in op.inputs):
            continue
        if op.name == "sharding_constraint":
            axes = _axes_of_constraint(op.params, current, frozenset())
            return dataclasses.replace(current, axes=axes)
        output = op.outputs[0] if op.outputs else current
        if output.size == value.size and op.name in (*_ALIKE, "reshape"):
            current = output
    return value


def _alike(op: Operation) -> list[tuple[Value, Value]]:
    """Return (input, output) pairs that correspond by position and have the same shape."""
    outputs = op.outputs if len(op.outputs) == len(op.inputs) else op.outputs[:1] * len(op.inputs)
    pairs = zip(op.inputs, outputs, strict=True)
    return [(value, output) for value, output in pairs if value.shape == output.shape]


def join(values: Sequence[Value], others: Sequence[Value]) -> None:
    """Split the dims of `values` like the corresponding dims of `others`, in place."""
    for value, other in zip(values, others, strict=True):
        value.axes = _merge_axes(value.axes, other.axes)


def _merge_axes(axes: Axes, others: Axes) -> Axes:
    """Return `axes` with dims that `others` split, or split further; an axis splits one dim."""
    taken = {axis for dim in axes for axis in dim}
    merged = []
    for dim, other in zip(axes, others, strict=True):
        added = other[len(dim) :]
        extends = other[: len(dim)] == dim and not taken.intersection(added)
        merged.append(other if extends else dim)
        taken.update(merged[-1])
    return tuple(merged)


def passed_on(operation: Operation, output: Value, manual: frozenset[str]) -> Axes:
    """Return the axes that an output is split over, given the axes of the operation's inputs.

    Args:
        output: one of its outputs.
        manual: mesh axes that are manual here, which sharding constraints do not apply to.
    """
    inputs = operation.inputs
    params = operation.params
    rank = len(output.shape)
    if operation.name == "sharding_constraint":
        return _axes_of_constraint(params, inputs[0], manual)
    if not any(any(value.axes) for value in inputs):
        return output.axes
    first = inputs[0]
    match operation.name:
        case "optimization_barrier":  # it has several inputs, and may have several of a shape
            pairs = zip(inputs, operation.outputs, strict=True)
            return next(value.axes for value, other in pairs if other is output)
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
            return _axes_after_reshape(first, output.shape)
        case "stack":
            axis = params["axis"]
            return (*first.axes[:axis], (), *first.axes[axis:])
        case "gather":
            return _by_size(inputs, output)
        case "scatter-add" | "scatter":
            return _of_scatter(params["dimension_numbers"], *inputs)
    if operation.name.startswith(("reduce_", "arg")) and "axes" in params:
        return tuple(a for dim, a in enumerate(first.axes) if dim not in params["axes"])
    return _by_position(inputs, output)


def _axes_of_constraint(params: Mapping, value: Value, manual: frozenset[str]) -> Axes:
    spec = getattr(params["sharding"], "spec", None)
    if spec is None:
        return value.axes
    axes = list(without(axes_by_dim(spec, len(value.shape)), manual))
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


def _axes_after_reshape(value: Value, shape: tuple[int, ...]) -> Axes:
    """Return the axes after a reshape.

    A dim keeps its axes if the dims before it have the same number of elements before and after.
    So a split dim that is divided or merged stays split in its leading part: [B/data, T, D] becomes
    [B·T/data, D].
    """
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
    """Return the operand's axes, extended by the updates' axes for dims that they span fully.

    So gradients that a loop adds to zeros are split like the values that are added: in `[L, D, F]`,
    which is unsplit at first, D and F are split as in the `[D, F]` of a layer.
    """
    numbers = dimension_numbers
    outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [dim for dim in range(len(operand.shape)) if dim not in outside]
    axes: list[tuple[str, ...]] = [()] * len(operand.shape)
    for dim, place in zip(window, numbers.update_window_dims, strict=True):
        if operand.shape[dim] == updates.shape[place]:
            axes[dim] = updates.axes[place]
    return _merge_axes(operand.axes, tuple(axes))


def _by_position(inputs: Sequence[Value], output: Value) -> Axes:
    """Return each dim's axes, from the inputs of the same rank that have the same size there."""
    axes: list[tuple[str, ...]] = [()] * len(output.shape)
    for value in inputs:
        if len(value.shape) == len(axes):
            for dim, dim_axes in enumerate(value.axes):
                is_free = not axes[dim] and not any(set(dim_axes) & set(a) for a in axes)
                if is_free and value.shape[dim] == output.shape[dim]:
                    axes[dim] = dim_axes
    return tuple(axes)


def _by_size(inputs: Sequence[Value], output: Value) -> Axes:
    """Return axes for dims of unchanged size; with several inputs, earlier ones take precedence."""
    if len(inputs[0].shape) == len(output.shape):
        return _by_position(inputs[:1], output)
    axes: list[tuple[str, ...]] = [()] * len(output.shape)
    for value in inputs:
        for dim, dim_axes in enumerate(value.axes):
            places = [d for d, size in enumerate(output.shape) if size == value.shape[dim]]
            is_taken = any(set(dim_axes) & set(a) for a in axes)
            if dim_axes and places and not is_taken and not axes[places[-1]]:
                axes[places[-1]] = dim_axes
    return tuple(axes)
