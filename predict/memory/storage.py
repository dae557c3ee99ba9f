"""How the values of a running program are stored: buffers, and fusions that read them."""

import collections
import dataclasses
import math
from collections.abc import Mapping

from predict.memory.operations import STORED, Loop, Operation, Program, Value
from predict.memory.primitives import KERNELS, REDUCTIONS, UNFUSED, VIEWS
from sharding.labels import TEMPORARIES


@dataclasses.dataclass(eq=False)
class Buffer:
    """An allocation in device or host memory, live until no value refers to it any more."""

    num_bytes: int
    on_host: bool
    label: str
    start: int  # number of buffers allocated before it
    end: int | None = None  # number of buffers allocated before it was freed; None while it is live
    num_holders: int = 0
    num_pins: int = 0  # running loops and conditionals that keep its memory for their outputs
    is_input: bool = False
    is_read_at_end: bool = False  # by the computation of an output of the program
    is_written_over: bool = False  # by an output of the program


@dataclasses.dataclass(frozen=True, eq=False)
class Storage:
    """The storage of a value: an array in memory, or buffers that it can be computed from.

    Attributes:
        buffers: its own buffer if `is_made`, or else the buffers that its fusion reads.
        is_made: whether it is stored in memory; otherwise it is part of a fusion.
        is_costly: whether its fusion has an operation that is too expensive to recompute.
        label: label under which its memory is counted.
        moved: subset of `buffers` that is not read element by element, and so cannot be written
            over by this fusion.
        is_slice: whether it is a loop's slice of an array, read from that array without a copy.
        is_empty: whether it will be an array without initial values.
    """

    buffers: tuple[Buffer, ...] = ()
    is_made: bool = False
    is_costly: bool = False
    label: str = TEMPORARIES
    moved: frozenset[Buffer] = frozenset()
    is_slice: bool = False
    is_empty: bool = False


class Frame:
    """The values of a program during its run: their storage, and how often they are still read."""

    def __init__(self, program: Program, *, is_cpu: bool):
        self.storage: dict[Value, Storage] = {}
        self.places: dict[Value, Buffer] = {}  # buffers that a loop's carry goes back to
        self.own_inputs: set[Buffer] = set()
        self.num_uses = collections.Counter(v for op in program.operations for v in op.inputs)
        self.num_uses.update(program.outputs)
        #: How often each value would be computed if it was not stored.
        readers = _num_readers(program)
        self.num_recomputations = readers if is_cpu else _num_fusions(program, readers)
        #: Results of fusions that store other results, too.
        self.has_siblings = {
            value
            for op in program.operations
            if op.name == STORED
            for value in (*op.inputs, op.params["with"])
        }
        #: Values that reductions read directly.
        self.summands = {v for op in program.operations if op.name in REDUCTIONS for v in op.inputs}
        #: Values that reductions read, directly or as part of a fusion. Barriers end fusions.
        self.is_reduced: set[Value] = set()
        for op in reversed(program.operations):
            if op.name == "optimization_barrier":
                continue
            if op.name in REDUCTIONS or not self.is_reduced.isdisjoint(op.outputs):
                if op.name not in UNFUSED and not isinstance(op, Loop) and not op.bodies:
                    self.is_reduced.update(op.inputs)
        #: Values to which a bias is added, or relu applied: as part of a product, cuBLAS does that.
        self.has_epilogue: set[Value] = set()
        made_by = {value: op for op in program.operations for value in op.outputs}
        for op in reversed(program.operations):
            if _is_epilogue(op, made_by):
                self.has_epilogue.update(op.inputs)
            elif op.name in (*VIEWS, "convert_element_type"):
                both = zip(op.inputs, op.outputs, strict=True)
                self.has_epilogue.update(v for v, output in both if output in self.has_epilogue)
        #: Initial values of loops, which are stored as soon as they are defined, even plain zeros.
        self.is_early: set[Value] = set()
        for op in reversed(program.operations):
            if isinstance(op, Loop):
                self.is_early.update(op.inputs[op.num_consts : op.num_consts + op.num_carry])
            elif op.name in VIEWS and self.is_early.intersection(op.outputs):
                pairs = zip(op.inputs, op.outputs, strict=True)
                self.is_early.update(v for v, output in pairs if output in self.is_early)

    def __getitem__(self, value: Value) -> Storage:
        return self.storage.get(value, Storage())  # literals and constants take no memory

    def place(self, program: Program, places: Mapping[Value, Buffer]) -> None:
        """Set the buffers of outputs, and of all values that are views of these outputs."""
        self.places = dict(places)
        for op in reversed(program.operations):
            if op.name in VIEWS and not self.places.keys().isdisjoint(op.outputs):
                for value, output in pairs(op):
                    if output in self.places:
                        self.places.setdefault(value, self.places[output])


def _num_readers(program: Program) -> collections.Counter[Value]:
    """Return how many operations read each value.

    Reductions do not count: they compute their inputs in their own fusion.
    """
    num_readers = collections.Counter(program.outputs)
    for op in program.operations:
        if op.name not in (*REDUCTIONS, STORED):
            num_readers.update(op.inputs)
    return num_readers


def _num_fusions(program: Program, num_readers: Mapping[Value, int]) -> dict[Value, int]:
    """Return how many fusions read each value; several readers in one fusion count once."""
    viewed: dict[Value, Value] = {}  # a view -> the value that it is a view of
    for op in program.operations:
        if op.name in VIEWS:
            viewed |= {output: viewed.get(value, value) for value, output in pairs(op)}
    # A value -> the results of the fusions which it is part of.
    results: dict[Value, set[Value]] = collections.defaultdict(set)
    for value in program.outputs:
        results[value].add(viewed.get(value, value))
    for op in reversed(program.operations):
        is_kernel = op.name in (*UNFUSED, "device_put") or op.name.startswith(KERNELS)
        for value in op.inputs:
            itself = viewed.get(value, value)
            if op.name == STORED:
                sibling: Value = op.params["with"]
                results[value] = {viewed.get(sibling, sibling)}
            elif is_kernel or op.bodies:
                results[value].add(itself)
            elif op.name in REDUCTIONS:
                results[value].update(op.outputs)
            else:
                for output in op.outputs:
                    array = viewed.get(output, output)
                    # Other readers of a stored array do not compute it again.
                    results[value] |= {array} if array in results[output] else results[output]
    return {value: min(num_readers[value], len(names)) for value, names in results.items()}


def _is_epilogue(op: Operation, made_by: Mapping[Value, Operation]) -> bool:
    """Return whether an operation adds a broadcast array, or is the maximum with a constant."""
    if op.name == "max":
        return any(value.literal is not None for value in op.inputs)
    if op.name != "add":
        return False
    size = math.prod(op.outputs[0].shape)
    is_smaller = any(math.prod(value.shape) < size for value in op.inputs)
    sources = [made_by[value].name for value in op.inputs if value in made_by]
    return is_smaller or "broadcast_in_dim" in sources


def pairs(op: Operation) -> list[tuple[Value, Value]]:
    """Return (input, output) pairs such that the output may reuse the input's memory."""
    is_one_to_one = len(op.inputs) == len(op.outputs)
    inputs = op.inputs if is_one_to_one else op.inputs[:1] * len(op.outputs)
    return list(zip(inputs, op.outputs, strict=True))
