"""Tests that products which nothing waits for are moved to the end of a program."""

import pytest

from predict.memory.operations import STORED, Operation, Program, Value
from predict.memory.passes.late_products import values_sent_on, with_late_products


def backward(*, reduction: str | None = None, slices: bool = False) -> Program:
    """Return the backward of `gelu(x @ w1) @ w2`, whose gradients may be reduced over devices.

    Args:
        reduction: operation that reduces gradients, if there is one.
        slices: whether a device reads only a part of the reduced gradient of w2.
    """
    names = (
        "x",
        "a",
        "dy",
        "w1",
        "w2",
        "dw1",
        "dw2",
        "da",
        "dh",
        "dx",
        "reduced1",
        "reduced2",
        "part",
    )
    values = {name: Value((8, 8), itemsize=4, on_host=False, axes=((), ())) for name in names}

    def operation(kind: str, inputs: str, output: str) -> Operation:
        return Operation(kind, [values[name] for name in inputs.split()], [values[output]], {})

    operations = [
        operation("dot_general", "a dy", "dw2"),
        operation("dot_general", "dy w2", "da"),
        operation("mul", "da a", "dh"),
        operation("dot_general", "x dh", "dw1"),
        operation("dot_general", "dh w1", "dx"),
    ]
    gradients = ("dw1", "dw2")
    if reduction is not None:
        operations.insert(4, operation(reduction, "dw1", "reduced1"))
        operations.insert(1, operation(reduction, "dw2", "reduced2"))
        gradients = ("reduced1", "reduced2")
    if slices:
        operations.append(operation("dynamic_slice", "reduced2", "part"))
        gradients = ("reduced1", "part")
    inputs = [values[name] for name in ("x", "a", "dy", "w1", "w2")]
    return Program(inputs, operations, [values[name] for name in (*gradients, "dx")])


def order(before: Program, after: Program) -> list[int]:
    """Return the operations of `after` by their positions in `before`."""
    assert (before.inputs, before.outputs) == (after.inputs, after.outputs)
    return [before.operations.index(op) for op in after.operations]


def test_weight_gradients_of_a_layer_come_last():
    program = backward()
    # No product of this body waits for dx, so it is late as well.
    assert order(program, with_late_products(program, is_body=True)) == [1, 2, 0, 3, 4]


def test_weight_gradients_outside_of_loops_are_late_only_if_they_are_reduce_scattered():
    scattered = backward(reduction="reduce_scatter")
    assert order(scattered, with_late_products(scattered, is_body=False)) == [2, 3, 6, 0, 1, 4, 5]
    summed = backward(reduction="psum")
    assert order(summed, with_late_products(summed, is_body=False)) == list(range(7))
    sliced = backward(reduction="psum", slices=True)
    assert order(sliced, with_late_products(sliced, is_body=False)) == [2, 3, 4, 5, 6, 0, 1, 7]
    local = backward()
    assert order(local, with_late_products(local, is_body=False)) == list(range(5))


@pytest.mark.parametrize(("num_loops", "is_late"), [(0, False), (1, True), (2, False)])
@pytest.mark.parametrize("kind", ["dot_general", "reduce_sum"])
def test_gradients_that_only_leave_the_loop_over_microbatches_are_late(kind, num_loops, is_late):
    values = [Value((8, 8), itemsize=4, on_host=False, axes=((), ())) for _ in range(6 + num_loops)]
    x, dy, w, gradient, dx, *rest = values
    operations = [
        Operation(kind, [x, dy], [gradient], {}),
        Operation("dot_general", [dy, w], [dx], {}),
    ]
    for i in range(num_loops):
        operations.append(Operation("once", [[gradient, *rest][i]], [rest[i]], {}))
    operations.append(Operation("psum", [[gradient, *rest][num_loops]], [rest[num_loops]], {}))
    program = Program([x, dy, w], operations, [rest[num_loops], dx])
    after = with_late_products(program, is_body=False)
    assert (order(program, after)[0] == 1) == is_late


def test_gradients_of_parameters_that_are_copied_to_host_memory_are_late():
    names = ("x", "dy", "w", "dw", "bias_gradient", "dx")
    values = {name: Value((8, 8), itemsize=4, on_host=False, axes=((), ())) for name in names}

    def program(*, to_host: bool) -> Program:
        operations = [
            Operation("dot_general", [values["x"], values["dy"]], [values["dw"]], {}),
            Operation("reduce_sum", [values["dy"]], [values["bias_gradient"]], {}),
            Operation("dot_general", [values["dy"], values["w"]], [values["dx"]], {}),
        ]
        for gradient in ("dw", "bias_gradient"):
            output = Value((8, 8), itemsize=4, on_host=to_host, axes=((), ()))
            operations.append(Operation("device_put", [values[gradient]], [output], {}))
        return Program([values[n] for n in ("x", "dy", "w")], operations, [values["dx"]])

    sent = program(to_host=True)
    assert order(sent, with_late_products(sent, is_body=False)) == [2, 0, 1, 3, 4]
    kept = program(to_host=False)
    assert order(kept, with_late_products(kept, is_body=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("is_added", "num_kept"), [(False, 1), (True, 0)])
def test_reduce_scatters_of_a_loop_end_in_the_next_iteration_if_nothing_else_reads_them(
    is_added, num_kept
):
    names = ("gradients", "i", "x", "gradient", "scattered", "rounded", "total", "updated")
    values = {name: Value((8,), itemsize=4, on_host=False, axes=((),)) for name in names}

    def operation(kind: str, inputs: str, output: str) -> Operation:
        return Operation(kind, [values[name] for name in inputs.split()], [values[output]], {})

    operations = [
        operation("mul", "x x", "gradient"),
        operation("reduce_scatter", "gradient", "scattered"),
        operation("convert_element_type", "scattered", "rounded"),
        operation("add", "rounded x", "total"),
        operation(
            "dynamic_update_slice", f"gradients {'total' if is_added else 'rounded'} i", "updated"
        ),
    ]
    if not is_added:
        del operations[3]
    body = Program([values[name] for name in names[:3]], operations, [values["updated"]])
    assert values_sent_on(body) == [values["gradient"]] * num_kept


def test_output_of_a_gate_is_stored_with_the_gradients_of_what_it_is_computed_from():
    """`a` is stored by the fusion that computes du and dg, so that `g` and `u` can go."""
    names = (
        "x",
        "g",
        "u",
        "dy",
        "w1",
        "w2",
        "w3",
        "s",
        "a",
        "da",
        "du",
        "dg",
        "dw2",
        "dx1",
        "dx2",
        "dx",
        "out",
    )
    values = {name: Value((8, 8), itemsize=4, on_host=False, axes=((), ())) for name in names}

    def operation(kind: str, inputs: str, output: str) -> Operation:
        return Operation(kind, [values[name] for name in inputs.split()], [values[output]], {})

    operations = [
        operation("logistic", "g", "s"),
        operation("mul", "s u", "a"),
        operation("dot_general", "a dy", "dw2"),
        operation("dot_general", "dy w2", "da"),
        operation("mul", "da s", "du"),
        operation("mul", "da g", "dg"),
        operation("dot_general", "du w1", "dx1"),
        operation("dot_general", "dg w3", "dx2"),
        operation("add", "dx1 dx2", "dx"),
        operation("dot_general", "dx w1", "out"),  # of the layer below
    ]
    inputs = [values[name] for name in ("g", "u", "dy", "w1", "w2", "w3")]
    program = Program(inputs, operations, [values["dw2"], values["out"]])
    after = with_late_products(program, is_body=True).operations
    (place,) = [i for i, op in enumerate(after) if op.name == STORED]
    assert after[place].inputs == [values["a"]]
    assert after[place + 1] is operations[5]  # dg, the last that reads g
    assert after[place].params["with"] is values["dg"]
    assert after.index(operations[2]) > place
    assert all(op.name != STORED for op in with_late_products(program, is_body=False).operations)
