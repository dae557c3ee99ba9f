"""Tests that unrolled layers gather and scatter during the layers next to them."""

from predict.memory.operations import Operation, Program, Value
from predict.memory.passes.unrolled import with_overlapped_layers
from sharding.labels import LAYER


def program_of(text: str) -> tuple[Program, dict[Value, str]]:
    """Return a program, and the names of its values.

    Args:
        text: one line per operation, `output = operation input input`. The operation `layer`
            begins an unrolled layer.
    """
    lines = [line.replace("=", " ").split() for line in text.strip().splitlines()]
    names = dict.fromkeys(name for output, _, *inputs in lines for name in (output, *inputs))
    values = {name: Value((8, 8), itemsize=4, on_host=False, axes=((), ())) for name in names}
    operations = []
    for output, kind, *inputs in lines:
        name = {"layer": "name", "barrier": "optimization_barrier"}.get(kind, kind)
        params = {"name": LAYER} if kind == "layer" else {}
        operations.append(
            Operation(name, [values[name] for name in inputs], [values[output]], params)
        )
    made = {output for output, *_ in lines}
    read = {name for _, _, *inputs in lines for name in inputs}
    program = Program(
        [values[name] for name in names if name not in made],
        operations,
        [values[name] for name in names if name not in read],
    )
    return program, {value: name for name, value in values.items()}


def order_after(text: str) -> list[str]:
    """Return the names of the outputs in the order in which the pass lets them be computed."""
    program, names = program_of(text)
    operations = with_overlapped_layers(program).operations
    available = {*program.inputs}
    for op in operations:
        assert available.issuperset(op.inputs)  # nothing is read before it is computed
        available.update(op.outputs)
    return [names[output] for op in operations for output in op.outputs if output in names]


_FORWARD = """
    l1 = layer x0
    b1 = barrier l1
    g1 = all_gather w1
    x1 = dot_general b1 g1
    l2 = layer x1
    b2 = barrier l2
    g2 = all_gather w2
    x2 = dot_general b2 g2
    l3 = layer x2
    x3 = mul l3 l3
"""


def test_parameters_are_gathered_during_the_layer_before():
    assert order_after(_FORWARD) == "l1 b1 g2 g1 x1 l2 b2 x2 l3 x3".split()


def test_gathers_that_depend_on_their_layer_stay():
    """Experts gather the tokens of their layer."""
    of_tokens = _FORWARD.replace(
        "x2 = dot_general b2 g2", "t2 = all_gather b2\nx2 = dot_general t2 g2"
    )
    assert order_after(of_tokens) == "l1 b1 g2 g1 x1 l2 b2 t2 x2 l3 x3".split()


_BACKWARD = """
    l1 = layer dy
    d2 = dot_general dy w2
    g2 = dot_general dy x1
    s2 = reduce_scatter g2
    l2 = layer d2
    d1 = dot_general d2 w1
    l3 = layer d1
    d0 = dot_general d1 w0
    l4 = layer d0
    z = mul d0 s2
"""


def test_gradients_are_scattered_during_the_two_next_layers():
    order = order_after(_BACKWARD)
    assert order == "l1 d2 g2 l2 d1 l3 s2 d0 l4 z".split()


def test_scatters_that_the_next_layer_needs_stay():
    """Experts scatter their outputs."""
    of_tokens = _BACKWARD.replace("l2 = layer d2", "l2 = layer s2")
    assert order_after(of_tokens) == "l1 d2 g2 s2 l2 d1 l3 d0 l4 z".split()


def test_sums_of_gradients_follow_their_terms():
    """The head's gradient is added to the sum over microbatches, and then freed."""
    with_sum = _BACKWARD.replace("z = mul d0 s2", "z = mul d0 s2\ntotal = add before g2")
    order = order_after(with_sum)
    assert order.index("total") < order.index("l2")


def test_programs_without_layers_stay_as_they_are():
    text = "g = all_gather w\ny = dot_general x g\ns = reduce_scatter y"
    assert order_after(text) == ["g", "y", "s"]
