"""Estimates the memory and the work of a traced step on one device, before it is compiled.

The estimator runs the step's program (operations.py) once, with sizes instead of numbers. An output
is allocated when its operation runs and freed after its last use, and the estimate is the largest
total at any time. For example, `y = x + tanh(x @ w1) @ w2` has donated float32 inputs x [512, 512],
w1 [512, 2048] and w2 [2048, 512]:

    operation      allocated     in use while it runs    freed after it
    inputs         x, w1, w2      9 MiB
    a = x @ w1     a, 4 MiB      13 MiB  <- peak         w1, 4 MiB
    h = tanh(a)    nothing        9 MiB                               fused into its reader
    b = h @ w2     b, 1 MiB      10 MiB                  h, w2        h was written over a
    y = x + b      nothing        2 MiB                  b            written over x

The peak, x + w1 + w2 + a = 13 MiB, is reported by label: 9 MiB of inputs and 4 MiB of temporaries.
On a GPU, each product also has a workspace of 4 MiB while it runs.

The main memory optimizations of XLA are modelled: chains of element-wise operations are fused, so
that their intermediate values are never allocated; an operation writes over an input that has no
other reader, if it can; loops update their carry in place; buffers get the addresses that XLA would
give them (packing.py). XLA's own additions are not modelled: copies that change a layout, and
operations that its scheduler runs ahead of time.

Two habits of XLA's CPU compilers are modelled as well. They do not fuse reductions with the
operations that compute their inputs, so these inputs are allocated. And an input that is updated in
place but is also read by another fusion is copied first, which leaves its own memory free for other
buffers in the meantime. Elsewhere, reductions are fused, and so are all readers of such an input.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from sharding.estimate.operations import RENAMES, Loop, Operation, Program, Value
from sharding.estimate.packing import Lifetime, most_bytes_at_once, packed_bytes
from sharding.estimate.simplify import simplified

_COLLECTIVES = ("all_gather", "psum", "reduce_scatter", "all_to_all", "ppermute", "pmax", "pmin")
#: Operations that cannot be part of a fusion: their inputs and outputs are arrays in memory.
_UNFUSED = (
    "dot_general",
    "ragged_dot",
    "ragged_dot_general",
    "conv_general_dilated",
    "sort",
    "top_k",
    "cumsum",
    "cumprod",
    "cummax",
    "cumlogsumexp",
    "concatenate",
    "gather",
    "random_bits",
    "threefry2x32",
    "rng_bit_generator",
    "scatter",
    "scatter-add",
    "dynamic_update_slice",
    *_COLLECTIVES,
)
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")
#: XLA's GPU compiler changed its behaviour in between, as measured with jax 0.10.2 and 0.12.0.
_IS_NEW_XLA = jax.__version_info__ >= (0, 12)
#: cuBLAS's workspace, which exists while a product runs.
WORKSPACE_BYTES = 4 * 2**20
#: The same for a product that reads a loop's slice of an array and whose result is not added.
SLICED_WORKSPACE_BYTES = (32 if _IS_NEW_XLA else 4) * 2**20
#: Whether branches of a conditional copy inputs of the enclosing program before updating them.
COPIES_IN_BRANCHES = not _IS_NEW_XLA
#: Unfusible operations that write into their first input, or each output into its own input, unless
#: another operation still reads that input.
_IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice", "psum")
#: Prefixes of hand-written kernels, such as cuDNN's, which cannot be part of a fusion either.
_KERNELS = ("dot_product_attention", "custom_", "pallas", "ffi")
#: These end a fusion: their inputs are not allocated, but their outputs are.
_REDUCTIONS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "argmax",
    "argmin",
    "reduce",
    "reduce_window",
)
#: Operations that return an existing array under another name or shape.
_VIEWS = (
    "reshape",
    "squeeze",
    "expand_dims",
    "shard_map",
    "sharding_constraint",
    "stop_gradient",
    "copy",
    "bitcast_convert_type",
    "random_wrap",
    "random_unwrap",
    *RENAMES,
)
#: Too expensive to be recomputed for a second reader, so the result is stored.
_COSTLY = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "tanh",
    "logistic",
    "erf",
    "erf_inv",
    "sqrt",
    "rsqrt",
    "cbrt",
    "div",
    "rem",
    "pow",
    "sin",
    "cos",
)
#: These read elements from other positions than those they write, so they cannot work in place.
_MOVES = ("transpose", "rev", "slice", "dynamic_slice", "pad", "broadcast_in_dim", "roll")

#: Labels that `counted_as` accepts; then the label of all arrays that are not inputs and have none.
LABELS = ("parameters", "gradients", "activations")
TEMPORARIES = "temporaries"
#: Label of the memory that a step needs beyond the arrays that are counted here.
GAPS = "gaps"
#: For CPUs: gaps between arrays of different lifetimes, as a share of the arrays that a step has
#: allocated at its peak. The mean of 21 compiled steps of five models (docs/memory.md).
GAPS_SHARE = 0.08
#: For GPUs, where gaps are computed: the same share for XLA's scheduler, which computes some arrays
#: earlier than they are needed, or reads them later. The mean of the steps in docs/memory.md.
GPU_GAPS_SHARE = 0.04
#: Arrays smaller than this share of all arrays allocated at the peak leave no gaps worth computing.
_MIN_PACKED_SHARE = 1 / 2000


def counted_as(label: str, tree: Any) -> Any:
    """Count arrays of a traced function under `label`, one of LABELS, and return them unchanged."""
    assert label in LABELS
    return jax.tree.map(lambda x: checkpoint_name(x, label), tree)


@dataclasses.dataclass
class StepCost:
    """Work of one device in a step.

    Attributes:
        products: (FLOPs, bytes read and written) of a matrix product -> number of executions.
        host_bytes: bytes copied to or from host memory.
        network_bytes: bytes received through explicit collectives, which a `shard_map` contains.
    """

    products: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    host_bytes: int = 0
    network_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of all matrix products."""
        return sum(flops * times for (flops, _), times in self.products.items())

    def add(self, other: "StepCost", times: int = 1) -> None:
        """Add `times` times the work of `other`."""
        for product, count in other.products.items():
            self.products[product] += count * times
        self.host_bytes += times * other.host_bytes
        self.network_bytes += times * other.network_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes in device memory and in host memory, by label.

    The labels are LABELS, the labels of the inputs, TEMPORARIES and GAPS.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Total bytes in device memory."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Total bytes in host memory."""
        return sum(self.host.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(Needs):
    """Peak memory of a step on one device, and the work of the step."""

    work: StepCost  # in one step


def estimate(
    program: Program, labels: Iterable[str], mesh_shape: Mapping[str, int], *, platform: str
) -> Estimate:
    """Estimate the memory and the work of a program whose inputs are donated.

    Args:
        program: the program, from `open_jaxpr`.
        labels: one label per input.
        mesh_shape: sizes of the mesh axes.
        platform: platform of the devices, such as "cpu" or "gpu".
    """
    if platform != "cpu":
        program = simplified(program)
    run = _Run(mesh_shape, platform)
    inputs = []
    for value, label in zip(program.inputs, labels, strict=True):
        held = run.made(value, label)
        held.buffers[0].is_input = True
        inputs.append(held)
    run.program(program, inputs, len(program.outputs), is_whole=True)
    at_peak = {on_host: collections.Counter() for on_host in (False, True)}
    for on_host, buffers in run.at_peak.items():
        for buffer in buffers:
            at_peak[on_host][buffer.label] += buffer.num_bytes
    made = [buffer.num_bytes for buffer in run.at_peak[False] if not buffer.is_input]
    # While a copied input's own memory is free, temporaries use it: count only the rest.
    at_peak[False][TEMPORARIES] += _unused(run.copied, made)
    if platform == "cpu":
        gaps = GAPS_SHARE * sum(made)
    else:
        large = run.lifetimes(at_least=_MIN_PACKED_SHARE * sum(made))
        gaps = packed_bytes(large) - most_bytes_at_once(large) + GPU_GAPS_SHARE * sum(made)
    at_peak[False][GAPS] = round(gaps)
    return Estimate(device=at_peak[False], host=at_peak[True], work=run.work)


@dataclasses.dataclass(eq=False)
class _Buffer:
    """An allocation in device or host memory, live until no value refers to it any more."""

    num_bytes: int
    on_host: bool
    label: str
    start: int  # number of buffers allocated before it
    end: int | None = None  # number of buffers allocated before it was freed; None while it is live
    num_holders: int = 0
    num_loops: int = 0  # running loops that carry it, and therefore keep its memory
    is_input: bool = False
    is_read_at_end: bool = False  # by the computation of an output of the program
    is_written_over: bool = False  # by an output of the program


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """The storage of a value: an array in memory, or buffers that it can be computed from.

    Attributes:
        buffers: its own buffer if `is_made`, or else the buffers that its fusion reads.
        is_made: whether it is stored in memory; otherwise it is part of a fusion.
        is_costly: whether its fusion has an operation that is too expensive to recompute.
        label: label under which its memory is counted.
        moved: the subset of `buffers` that is not read element by element, and so cannot be written
            over by this fusion.
        is_slice: whether it is a loop's slice of an array, read from that array without a copy.
    """

    buffers: tuple[_Buffer, ...] = ()
    is_made: bool = False
    is_costly: bool = False
    label: str = TEMPORARIES
    moved: frozenset[_Buffer] = frozenset()
    is_slice: bool = False


class _Frame:
    """The values of a program during its run: their storage, and how often they are still read."""

    def __init__(self, program: Program):
        self.held: dict[Value, _Held] = {}
        self.places: dict[Value, _Buffer] = {}  # buffers that a loop's carry goes back to
        self.own_inputs: set[_Buffer] = set()
        self.num_uses = collections.Counter(v for op in program.operations for v in op.inputs)
        self.num_uses.update(program.outputs)
        #: Values that reductions read, directly or as part of a fusion.
        self.is_reduced: set[Value] = set()
        for op in reversed(program.operations):
            if op.name in _REDUCTIONS or not self.is_reduced.isdisjoint(op.outputs):
                if op.name not in _UNFUSED and not isinstance(op, Loop) and not op.bodies:
                    self.is_reduced.update(op.inputs)
        #: Values that are added to another one.
        self.is_added = {v for op in program.operations if op.name == "add" for v in op.inputs}
        #: Initial values of loops, which are stored as soon as they are defined, even plain zeros.
        self.is_early: set[Value] = set()
        for op in reversed(program.operations):
            if isinstance(op, Loop):
                self.is_early.update(op.inputs[op.num_consts : op.num_consts + op.num_carry])
            elif op.name in _VIEWS and self.is_early.intersection(op.outputs):
                pairs = zip(op.inputs, op.outputs, strict=True)
                self.is_early.update(v for v, output in pairs if output in self.is_early)

    def __getitem__(self, value: Value) -> _Held:
        return self.held.get(value, _Held())  # literals and constants take no memory

    def place(self, program: Program, places: Mapping[Value, _Buffer]) -> None:
        """Set the buffers of outputs, and of all values that are views of these outputs."""
        self.places = dict(places)
        for op in reversed(program.operations):
            if op.name in _VIEWS and not self.places.keys().isdisjoint(op.outputs):
                for value, output in _pairs(op):
                    if output in self.places:
                        self.places.setdefault(value, self.places[output])


class _Run:
    """Runs programs with sizes instead of numbers.

    Counts the readers of every value. A value without readers releases its buffers, and a buffer
    that no value holds is freed. Totals and peaks are kept for device memory and for host memory.
    """

    def __init__(self, mesh_shape: Mapping[str, int], platform: str):
        self._mesh_shape = mesh_shape
        self._is_cpu = platform == "cpu"
        self._live: dict[bool, dict[_Buffer, None]] = {False: {}, True: {}}
        self._total = {False: 0, True: 0}
        self._peak = {False: 0, True: 0}
        self.at_peak: dict[bool, list[_Buffer]] = {False: [], True: []}
        self.copied: list[int] = []  # bytes of inputs that are copied before they are updated
        self._buffers: list[_Buffer] = []  # all buffers ever allocated
        self.work = StepCost()

    def program(
        self,
        program: Program,
        inputs: Sequence[_Held],
        num_made: int,
        *,
        is_whole: bool = False,
        places: Sequence[_Buffer] = (),
    ) -> list[_Held]:
        """Run a program and return the storage of its outputs.

        Args:
            program: the program.
            inputs: storage of its inputs. The caller hands over the inputs, and has to release the
                returned outputs.
            num_made: number of leading outputs that must be arrays in memory.
            is_whole: whether this is the whole step, rather than a body or branch.
            places: buffers for the leading outputs, used if they are free when an output is made.
        """
        frame = _Frame(program)
        if places:
            frame.place(program, dict(zip(program.outputs, places, strict=False)))
        if not is_whole:
            frame.own_inputs.update(buffer for held in inputs for buffer in held.buffers)
        for value, held in zip(program.inputs, inputs, strict=True):
            if frame.num_uses[value]:
                frame.held[value] = held
            else:
                self.release(held)
        for op in program.operations:
            self._operation(op, frame)
        outputs = []
        for i, value in enumerate(program.outputs):
            if i < num_made:
                self._make(value, frame, is_output=is_whole)
            outputs.append(self._hold(frame[value]))
            self._done(frame, value)
        assert not frame.held
        return outputs

    def made(self, value: Value, label: str = TEMPORARIES, place: _Buffer | None = None) -> _Held:
        """Return a new array in memory; it reuses the buffer `place` if that is free."""
        size = self._size(value)
        if place is not None and place.num_holders == 0:
            if (place.num_bytes, place.on_host) == (size, value.on_host):
                return self._hold(_Held((place,), is_made=True, label=label))
        buffer = _Buffer(size, value.on_host, label, start=len(self._buffers))
        self._buffers.append(buffer)
        live = self._live[value.on_host]
        where = value.on_host
        live[buffer] = None
        self._total[where] += buffer.num_bytes
        if self._total[where] > self._peak[where]:
            self._peak[where] = self._total[where]
            self.at_peak[where] = list(live)
        return self._hold(_Held((buffer,), is_made=True, label=label))

    def release(self, held: _Held) -> None:
        """Drop one reference to the buffers of a value, and free those without references."""
        for buffer in held.buffers:
            buffer.num_holders -= 1
            if buffer.num_holders == 0 and not buffer.num_loops:
                del self._live[buffer.on_host][buffer]
                self._total[buffer.on_host] -= buffer.num_bytes
                buffer.end = len(self._buffers)

    def lifetimes(self, at_least: float) -> list[Lifetime]:
        """Return the lifetimes of the device buffers that were allocated during the run.

        Time is measured in buffers allocated so far. Inputs are not included.

        Args:
            at_least: bytes; smaller buffers are left out.
        """
        last = len(self._buffers) + 1
        return [
            Lifetime(buffer.num_bytes, buffer.start, buffer.end or last)
            for buffer in self._buffers
            if not (buffer.is_input or buffer.on_host) and buffer.num_bytes >= at_least
        ]

    def _hold(self, held: _Held) -> _Held:
        for buffer in held.buffers:
            buffer.num_holders += 1
        return held

    def _size(self, value: Value) -> int:
        return value.num_bytes(self._mesh_shape)

    def _done(self, frame: _Frame, *values: Value) -> None:
        """Record that each of the values has been read once."""
        for value in values:
            frame.num_uses[value] -= 1
            if frame.num_uses[value] <= 0 and value in frame.held:
                self.release(frame.held.pop(value))

    def _make(self, value: Value, frame: _Frame, *, is_output: bool = False) -> _Held:
        """Store a value as an array in memory, and return its storage.

        The array is written over a buffer that the value is computed from, if one has the same size
        and no other reader; otherwise it is newly allocated.

        Args:
            value: the value, which may be part of a fusion so far.
            frame: the program's values.
            is_output: whether it is an output of the whole step. Outputs are made together, each
                over an input if possible.
        """
        held = frame[value]
        if held.is_made:
            return held
        size = self._size(value)
        made = None
        # Prefer a buffer with few other readers; outputs of the step may take one that has some.
        for buffer in sorted(held.buffers, key=lambda buffer: buffer.num_holders):
            is_same = (buffer.num_bytes, buffer.on_host) == (size, value.on_host)
            is_free = buffer.num_holders == 1 or is_output and not buffer.is_written_over
            if not self._is_cpu and not is_output and value in frame.is_reduced:
                is_free = False  # a fusion that also reduces its result writes over no input
            if made is None and is_same and is_free and buffer not in held.moved:
                made = self._hold(_Held((buffer,), is_made=True))
                is_read = buffer.is_read_at_end or buffer.num_holders > 2
                if self._is_cpu and is_output and is_read:
                    self.copied.append(buffer.num_bytes)
                buffer.is_written_over = is_output
            buffer.is_read_at_end |= is_output
        made = made or self.made(value, held.label, frame.places.get(value))
        self.release(held)
        frame.held[value] = made
        return made

    def _operation(self, op: Operation, frame: _Frame) -> None:
        if isinstance(op, Loop):
            outputs = self._loop(op, frame)
        elif op.name == "cond":
            outputs = self._cond(op, frame)
        elif op.name in (*_VIEWS, "device_put"):
            outputs = self._view(op, frame)
        elif op.name in (*_UNFUSED, *_REDUCTIONS) or op.name.startswith(_KERNELS):
            outputs = self._unfused(op, frame)
        else:
            outputs = self._fused(op, frame)
        for value, held in zip(op.outputs, outputs, strict=True):
            # Free unread outputs at once. Store expensive values that several operations read,
            # where XLA would otherwise recompute them in each reader's fusion.
            if not frame.num_uses[value]:
                self.release(held)
                continue
            frame.held[value] = held
            is_shared = held.is_costly and frame.num_uses[value] > 1
            is_early = self._is_cpu and op.name == "broadcast_in_dim" and value in frame.is_early
            if is_shared or is_early:
                self._make(value, frame)

    def _view(self, op: Operation, frame: _Frame) -> list[_Held]:
        """Return an existing array under another name, or copy it between device and host."""
        outputs = []
        for value, output in _pairs(op):
            held = frame[value]
            if op.name == "device_put" and value.on_host != output.on_host:
                self._make(value, frame)
                outputs.append(self.made(output, held.label))
                self.work.host_bytes += self._size(output)
                continue
            if op.name == "name" and op.params["name"] in LABELS:
                held = dataclasses.replace(held, label=op.params["name"])
                for buffer in held.buffers if held.is_made else ():
                    buffer.label = held.label
            outputs.append(self._hold(held))
        self._done(frame, *op.inputs)
        return outputs

    def _fused(self, op: Operation, frame: _Frame) -> list[_Held]:
        """Add an element-wise operation to a fusion: allocate nothing, keep its inputs alive."""
        inputs = [frame[value] for value in op.inputs]
        buffers = tuple(dict.fromkeys(b for held in inputs for b in held.buffers))
        is_costly = op.name in _COSTLY or any(h.is_costly and not h.is_made for h in inputs)
        moved = frozenset(buffers if op.name in _MOVES else (b for h in inputs for b in h.moved))
        fused = _Held(buffers, is_costly=is_costly, moved=moved)
        outputs = [self._hold(fused) for _ in op.outputs]
        self._done(frame, *op.inputs)
        return outputs

    def _unfused(self, op: Operation, frame: _Frame) -> list[_Held]:
        """Run an operation whose inputs and outputs are arrays in memory."""
        reads_slice = any(frame[value].is_slice for value in op.inputs)
        for i, value in enumerate(op.inputs):
            # Two kinds of inputs need not be stored, because they are fused with their reader: the
            # update of a dynamic_update_slice and, except on CPUs, the input of a reduction.
            is_fused = op.name == "dynamic_update_slice" and i == 1
            if not is_fused and (self._is_cpu or op.name not in _REDUCTIONS):
                self._make(value, frame)
        outputs = []
        for value, output in _pairs(op):
            held = frame[value]
            size = self._size(output)
            is_last = held.is_made and frame.num_uses[value] == held.buffers[0].num_holders == 1
            if op.name in _IN_PLACE and is_last and held.buffers[0].num_bytes == size:
                outputs.append(self._hold(held))
            else:
                outputs.append(self.made(output, place=frame.places.get(output)))
        if op.name in _PRODUCTS and not self._is_cpu:
            reads_slice &= frame.is_added.isdisjoint(op.outputs)
            size = SLICED_WORKSPACE_BYTES if reads_slice else WORKSPACE_BYTES
            workspace = Value((size,), itemsize=1, on_host=False, axes=((),))
            self.release(self.made(workspace))
        self._count(op)
        self._done(frame, *op.inputs)
        return outputs

    def _count(self, op: Operation) -> None:
        """Count the work of an operation."""
        if op.name == "dot_general":
            (contracted, _), _ = op.params["dimension_numbers"]
            left = op.inputs[0]
            output = op.outputs[0]
            shape = left.local_shape(self._mesh_shape)
            flops = 2 * math.prod(output.local_shape(self._mesh_shape))
            flops *= math.prod(shape[dim] for dim in contracted)
            self.work.products[flops, sum(map(self._size, (*op.inputs, output)))] += 1
        elif op.name in _COLLECTIVES:
            self.work.network_bytes += sum(map(self._size, op.outputs))

    def _loop(self, op: Loop, frame: _Frame) -> list[_Held]:
        """Run a loop: its body once, with the work of all iterations."""
        consts = op.num_consts
        carried = op.num_consts + op.num_carry
        inputs = []
        for i, value in enumerate(op.inputs):
            held = self._make(value, frame)
            # The carry lives in the buffer of its initial value, or in a copy if others read that.
            if consts <= i < carried:
                is_last = frame.num_uses[value] == held.buffers[0].num_holders == 1
                inputs.append(self._hold(held) if is_last else self.made(value, held.label))
                self._done(frame, value)
            else:  # a scanned input is not copied: each slice is read from the whole array
                is_const = i < consts
                seen = _Held(held.buffers, is_made=is_const, is_slice=not is_const)
                inputs.append(self._hold(seen))
        # Stacked outputs are allocated as a whole before the first iteration.
        stacked = [self.made(value) for value in op.outputs[op.num_carry :]]
        before = self.work
        self.work = StepCost()
        if self._is_cpu:
            outputs = self.program(op.bodies[0], inputs, op.num_carry)
        else:
            outputs = self._in_places(op, inputs, [h.buffers[0] for h in inputs[consts:carried]])
        before.add(self.work, op.trip_count)
        self.work = before
        self._done(frame, *op.inputs[:consts], *op.inputs[carried:])
        for held in outputs[op.num_carry :]:
            self.release(held)
        return [*outputs[: op.num_carry], *stacked]

    def _in_places(
        self, op: Loop, inputs: Sequence[_Held], places: Sequence[_Buffer]
    ) -> list[_Held]:
        """Run a loop's body; its carry returns to its own buffers, by a copy if necessary."""
        for place in places:
            place.num_loops += 1
        outputs = self.program(op.bodies[0], inputs, op.num_carry, places=places)
        carried = [self._hold(_Held((place,), is_made=True)) for place in places]
        for made in outputs[: op.num_carry]:
            self.release(made)
        for place in places:
            place.num_loops -= 1
        return [*carried, *outputs[op.num_carry :]]

    def _cond(self, op: Operation, frame: _Frame) -> list[_Held]:
        """Run every branch from the same state; the work of the most expensive one is counted."""
        inputs = [self._make(value, frame) for value in op.inputs][1:]
        kept = []
        if COPIES_IN_BRANCHES and not self._is_cpu:
            # Holding an input of the enclosing program keeps branches from updating it in place.
            kept = [self._hold(h) for h in inputs if not frame.own_inputs.isdisjoint(h.buffers)]
        start = self._state(frame)
        work = self.work
        results = []
        works = []
        for body in op.bodies:
            self._set(start, frame)
            self.work = StepCost()
            held = [self._hold(h) for h in inputs]
            self._done(frame, *op.inputs)
            results.append(self.program(body, held, len(op.outputs)))
            works.append(self.work)
        self._set(start, frame)
        self.work = work
        work.add(max(works, key=lambda w: (w.flops, w.host_bytes + w.network_bytes)))
        outputs: list[_Held | None] = []
        was_there = {buffer for live in self._live.values() for buffer in live}
        # If all branches return the same existing buffer, the output is that buffer.
        for made in zip(*results, strict=True):
            found = {held.buffers for held in made}
            is_kept = len(found) == 1 and was_there.issuperset(*found)
            outputs.append(self._hold(made[0]) if is_kept else None)
        self._done(frame, *op.inputs)
        made = [held or self.made(v) for held, v in zip(outputs, op.outputs, strict=True)]
        for held in kept:
            self.release(held)
        return made

    def _state(self, frame: _Frame) -> tuple:
        """Return a snapshot of everything that running a branch changes."""
        live = {on_host: dict(buffers) for on_host, buffers in self._live.items()}
        holders = {buffer: buffer.num_holders for buffers in live.values() for buffer in buffers}
        return live, holders, dict(self._total), dict(frame.held), dict(frame.num_uses)

    def _set(self, state: tuple, frame: _Frame) -> None:
        """Restore a snapshot made by `_state`."""
        live, holders, total, held, num_uses = state
        for on_host, buffers in self._live.items():
            for buffer in buffers.keys() - live[on_host].keys():
                # The output of a branch: `_cond` allocates the conditional's output in its place.
                buffer.end = len(self._buffers)
        self._live = {on_host: dict(buffers) for on_host, buffers in live.items()}
        self._total = dict(total)
        frame.held = dict(held)
        frame.num_uses = collections.Counter(num_uses)
        for buffer, num_holders in holders.items():
            buffer.num_holders = num_holders


def _unused(rooms: Sequence[int], guests: Sequence[int]) -> int:
    """Return the bytes of rooms that stay empty when guests move in.

    Rooms are filled in order of size, the largest first; each takes the largest guest that fits.
    """
    waiting = sorted(guests)
    left = 0
    for room in sorted(rooms, reverse=True):
        i = bisect.bisect_right(waiting, room)
        left += room - (waiting.pop(i - 1) if i else 0)
    return left


def _pairs(op: Operation) -> list[tuple[Value, Value]]:
    """Return (input, output) pairs such that the output may reuse the input's memory."""
    is_one_to_one = len(op.inputs) == len(op.outputs)
    inputs = op.inputs if is_one_to_one else op.inputs[:1] * len(op.outputs)
    return list(zip(inputs, op.outputs, strict=True))
