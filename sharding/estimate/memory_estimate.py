"""The memory and the work of a traced step on one device, estimated before it is compiled.

The step's program (program.py) is gone through once. What an operation gives out comes to be when
it runs, and goes when nothing reads it any more. What XLA does to save memory is followed in its
main lines: chains of element-wise operations are fused, so that nothing within them is ever made;
an operation that can write over an input that nobody else reads does; loops change what they carry
in place; addresses are given as XLA gives them (packing.py). What XLA adds is not: copies for
another layout, and what a scheduler runs ahead of time.

Of compilers for CPUs two habits are followed: what a reduction reads is made; and an input that is
changed in place and that another fusion reads as well is copied first, which leaves its own room to
others meanwhile. Elsewhere reductions are fused, and so is all that reads such an input.
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
#: What cannot be part of a fusion: its inputs and outputs are arrays in memory.
_UNFUSED = (
    *("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"),
    *("sort", "top_k", "cumsum", "cumprod", "cummax", "cumlogsumexp", "concatenate", "gather"),
    *("random_bits", "threefry2x32", "rng_bit_generator"),
    *("scatter", "scatter-add", "dynamic_update_slice"),
    *_COLLECTIVES,
)
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")
#: What differs between XLA's versions for GPUs, as measured with jax 0.10.2 and 0.12.0.
_IS_NEW_XLA = jax.__version_info__ >= (0, 12)
#: What cuBLAS works with in addition to the arrays of a product, for as long as that takes.
WORKSPACE_BYTES = 4 * 2**20
#: The same for a product that reads one of its inputs where a loop slices it, and adds nothing.
SLICED_WORKSPACE_BYTES = (32 if _IS_NEW_XLA else 4) * 2**20
#: Whether branches copy what the computation around them was given before they change it.
COPIES_IN_BRANCHES = not _IS_NEW_XLA
#: Of these, those that write into their first input, or each into its own, if nobody reads it.
_IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice", "psum")
#: Nor can kernels be part of one that are written out, such as cuDNN's.
_KERNELS = ("dot_product_attention", "custom_", "pallas", "ffi")
#: They end a fusion: what they read is not made, what they give out is.
_REDUCTIONS = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("reduce_xor", "argmax", "argmin", "reduce", "reduce_window"),
)
#: Another name for an array that is there.
_VIEWS = (
    *("reshape", "squeeze", "expand_dims", "shard_map", "sharding_constraint"),
    *("stop_gradient", "copy", "bitcast_convert_type", "random_wrap", "random_unwrap"),
    *RENAMES,
)
#: Too costly to be computed again for a second reader.
_COSTLY = (
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erf_inv", "sqrt"),
    *("rsqrt", "cbrt", "div", "rem", "pow", "sin", "cos"),
)
#: They read elements from elsewhere than where their own go: nothing is written over meanwhile.
_MOVES = ("transpose", "rev", "slice", "dynamic_slice", "pad", "broadcast_in_dim", "roll")

#: What `counted_as` takes, and what is neither these nor an input.
LABELS = ("parameters", "gradients", "activations")
TEMPORARIES = "temporaries"
#: What a step holds beyond the arrays that are counted here, as a share of what it makes.
GAPS = "gaps"
#: On CPUs arrays of different lives leave gaps between them: the mean of 21 compiled steps of five
#: models (docs/memory.md).
GAPS_SHARE = 0.08
#: For GPUs the gaps are computed. What is added is for XLA's scheduler, which computes some arrays
#: earlier than they are needed, or reads them later: the mean of the steps in docs/memory.md.
GPU_GAPS_SHARE = 0.04
#: Smaller ones than this share of all that a step makes leave no gaps worth computing.
_MIN_PACKED_SHARE = 1 / 2000


def counted_as(label: str, tree: Any) -> Any:
    """Returns the arrays of a traced function as they are; estimates count them under `label`."""
    assert label in LABELS
    return jax.tree.map(lambda x: checkpoint_name(x, label), tree)


@dataclasses.dataclass
class StepCost:
    """What one device does in a step.

    Attributes:
      products: (FLOPs, bytes read and written) of a matrix product -> how often it runs.
      host_bytes: that go to host memory or come from there.
      network_bytes: that come in through collectives which are written out by hand.
    """

    products: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    host_bytes: int = 0
    network_bytes: int = 0

    @property
    def flops(self) -> int:
        return sum(flops * times for (flops, _), times in self.products.items())

    def add(self, other: "StepCost", times: int = 1) -> None:
        for product, count in other.products.items():
            self.products[product] += count * times
        self.host_bytes += times * other.host_bytes
        self.network_bytes += times * other.network_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes in device memory and in host memory, by label.

    Labels are LABELS, those of the inputs, TEMPORARIES and GAPS.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(Needs):
    """What a step takes for one device, at the moment when most is in use, and what that does."""

    work: StepCost  # in one step


def estimate(
    program: Program, labels: Iterable[str], mesh_shape: Mapping[str, int], *, platform: str
) -> Estimate:
    """Returns what a program takes whose inputs are donated.

    Args:
      labels: of the inputs.
      platform: of the devices.
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
    """Bytes in the memory of the device or its host, until nothing holds them any more."""

    num_bytes: int
    on_host: bool
    label: str
    start: int  # how many buffers there were before it
    end: int | None = None  # likewise, when it went; None: it is there
    num_holders: int = 0
    num_loops: int = 0  # that carry it, and keep its place as long as they run
    is_input: bool = False
    is_read_at_end: bool = False  # by what makes an output of the program
    is_written_over: bool = False  # likewise


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """What a value stands for: an array in memory, or one that could be made from others."""

    buffers: tuple[_Buffer, ...] = ()
    is_made: bool = False
    is_costly: bool = False
    label: str = TEMPORARIES
    moved: frozenset[_Buffer] = frozenset()  # of the buffers, those not read element by element
    is_slice: bool = False  # of what a loop goes through, as it is there


class _Frame:
    """The values of a program that is being run: what they stand for, and who still reads them."""

    def __init__(self, program: Program):
        self.held: dict[Value, _Held] = {}
        self.places: dict[Value, _Buffer] = {}  # where values go that a loop carries on
        self.own_inputs: set[_Buffer] = set()
        self.num_uses = collections.Counter(v for op in program.operations for v in op.inputs)
        self.num_uses.update(program.outputs)
        #: What reductions read, directly or as part of a fusion.
        self.is_reduced: set[Value] = set()
        for op in reversed(program.operations):
            if op.name in _REDUCTIONS or not self.is_reduced.isdisjoint(op.outputs):
                if op.name not in _UNFUSED and not isinstance(op, Loop) and not op.bodies:
                    self.is_reduced.update(op.inputs)
        #: What is added to something.
        self.is_added = {v for op in program.operations if op.name == "add" for v in op.inputs}
        #: What a loop begins with is there from where it is written, be it only zeros.
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
        """Takes note of where outputs go, and with them what has only another name."""
        self.places = dict(places)
        for op in reversed(program.operations):
            if op.name in _VIEWS and not self.places.keys().isdisjoint(op.outputs):
                for value, output in _pairs(op):
                    if output in self.places:
                        self.places.setdefault(value, self.places[output])


class _Run:
    """Runs programs with nothing but sizes."""

    def __init__(self, mesh_shape: Mapping[str, int], platform: str):
        self._mesh_shape, self._is_cpu = mesh_shape, platform == "cpu"
        self._live: dict[bool, dict[_Buffer, None]] = {False: {}, True: {}}
        self._total, self._peak = {False: 0, True: 0}, {False: 0, True: 0}
        self.at_peak: dict[bool, list[_Buffer]] = {False: [], True: []}
        self.copied: list[int] = []  # bytes of inputs that are copied before they are changed
        self._buffers: list[_Buffer] = []  # all that there ever were
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
        """Returns what the outputs stand for, the first `num_made` of them arrays in memory.

        Args:
          inputs: what the inputs stand for, held for this program. The caller releases what is
            returned.
          is_whole: it is no part of another one.
          places: where the first outputs go if nothing is there any more when they are made.
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
        """Returns a new array in memory, at its place if that is free."""
        size = self._size(value)
        if place is not None and place.num_holders == 0:
            if (place.num_bytes, place.on_host) == (size, value.on_host):
                return self._hold(_Held((place,), is_made=True, label=label))
        buffer = _Buffer(size, value.on_host, label, start=len(self._buffers))
        self._buffers.append(buffer)
        live, where = self._live[value.on_host], value.on_host
        live[buffer] = None
        self._total[where] += buffer.num_bytes
        if self._total[where] > self._peak[where]:
            self._peak[where], self.at_peak[where] = self._total[where], list(live)
        return self._hold(_Held((buffer,), is_made=True, label=label))

    def release(self, held: _Held) -> None:
        for buffer in held.buffers:
            buffer.num_holders -= 1
            if buffer.num_holders == 0 and not buffer.num_loops:
                del self._live[buffer.on_host][buffer]
                self._total[buffer.on_host] -= buffer.num_bytes
                buffer.end = len(self._buffers)

    def lifetimes(self, at_least: float) -> list[Lifetime]:
        """Returns when each array of a program lived that came to be on the device meanwhile.

        Args:
          at_least: bytes; smaller arrays are left out.
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
        """Takes note that each of the values has been read once."""
        for value in values:
            frame.num_uses[value] -= 1
            if frame.num_uses[value] <= 0 and value in frame.held:
                self.release(frame.held.pop(value))

    def _make(self, value: Value, frame: _Frame, *, is_output: bool = False) -> _Held:
        """Returns what the value stands for, an array in memory from now on.

        Args:
          is_output: of the whole program. Outputs are made together, over inputs if they can be.
        """
        held = frame[value]
        if held.is_made:
            return held
        size, made = self._size(value), None
        for buffer in sorted(held.buffers, key=lambda buffer: buffer.num_holders):
            is_same = (buffer.num_bytes, buffer.on_host) == (size, value.on_host)
            is_free = buffer.num_holders == 1 or is_output and not buffer.is_written_over
            if not self._is_cpu and not is_output and value in frame.is_reduced:
                is_free = False  # a fusion that also reduces what it makes writes nothing over
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
            if not frame.num_uses[value]:
                self.release(held)
                continue
            frame.held[value] = held
            is_shared = held.is_costly and frame.num_uses[value] > 1
            is_early = self._is_cpu and op.name == "broadcast_in_dim" and value in frame.is_early
            if is_shared or is_early:
                self._make(value, frame)

    def _view(self, op: Operation, frame: _Frame) -> list[_Held]:
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
        inputs = [frame[value] for value in op.inputs]
        buffers = tuple(dict.fromkeys(b for held in inputs for b in held.buffers))
        is_costly = op.name in _COSTLY or any(h.is_costly and not h.is_made for h in inputs)
        moved = frozenset(buffers if op.name in _MOVES else (b for h in inputs for b in h.moved))
        fused = _Held(buffers, is_costly=is_costly, moved=moved)
        outputs = [self._hold(fused) for _ in op.outputs]
        self._done(frame, *op.inputs)
        return outputs

    def _unfused(self, op: Operation, frame: _Frame) -> list[_Held]:
        reads_slice = any(frame[value].is_slice for value in op.inputs)
        for i, value in enumerate(op.inputs):
            is_fused = op.name == "dynamic_update_slice" and i == 1
            if not is_fused and (self._is_cpu or op.name not in _REDUCTIONS):
                self._make(value, frame)
        outputs = []
        for value, output in _pairs(op):
            held, size = frame[value], self._size(output)
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
        if op.name == "dot_general":
            (contracted, _), _ = op.params["dimension_numbers"]
            left, output = op.inputs[0], op.outputs[0]
            shape = left.local_shape(self._mesh_shape)
            flops = 2 * math.prod(output.local_shape(self._mesh_shape))
            flops *= math.prod(shape[dim] for dim in contracted)
            self.work.products[flops, sum(map(self._size, (*op.inputs, output)))] += 1
        elif op.name in _COLLECTIVES:
            self.work.network_bytes += sum(map(self._size, op.outputs))

    def _loop(self, op: Loop, frame: _Frame) -> list[_Held]:
        consts, carried = op.num_consts, op.num_consts + op.num_carry
        inputs = []
        for i, value in enumerate(op.inputs):
            held = self._make(value, frame)
            if consts <= i < carried:
                is_last = frame.num_uses[value] == held.buffers[0].num_holders == 1
                inputs.append(self._hold(held) if is_last else self.made(value, held.label))
                self._done(frame, value)
            else:  # of slices, each one comes when it is read
                is_const = i < consts
                seen = _Held(held.buffers, is_made=is_const, is_slice=not is_const)
                inputs.append(self._hold(seen))
        stacked = [self.made(value) for value in op.outputs[op.num_carry :]]
        before, self.work = self.work, StepCost()
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
        """Runs a loop's body; what is carried goes back to where it was, by a copy if need be."""
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
        """Runs every branch from the same start; of their work, the most is counted."""
        inputs = [self._make(value, frame) for value in op.inputs][1:]
        kept = []
        if COPIES_IN_BRANCHES and not self._is_cpu:
            # What is an input around the branches is copied before one of them changes it.
            kept = [self._hold(h) for h in inputs if not frame.own_inputs.isdisjoint(h.buffers)]
        start, work, results, works = self._state(frame), self.work, [], []
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
        live = {on_host: dict(buffers) for on_host, buffers in self._live.items()}
        holders = {buffer: buffer.num_holders for buffers in live.values() for buffer in buffers}
        return live, holders, dict(self._total), dict(frame.held), dict(frame.num_uses)

    def _set(self, state: tuple, frame: _Frame) -> None:
        live, holders, total, held, num_uses = state
        for on_host, buffers in self._live.items():
            for buffer in buffers.keys() - live[on_host].keys():
                buffer.end = len(self._buffers)  # an output of a branch, which takes that of _cond
        self._live = {on_host: dict(buffers) for on_host, buffers in live.items()}
        self._total = dict(total)
        frame.held, frame.num_uses = dict(held), collections.Counter(num_uses)
        for buffer, num_holders in holders.items():
            buffer.num_holders = num_holders


def _unused(rooms: Sequence[int], guests: Sequence[int]) -> int:
    """Returns the bytes of rooms that are left when each has taken the largest guest that fits."""
    waiting, left = sorted(guests), 0
    for room in sorted(rooms, reverse=True):
        i = bisect.bisect_right(waiting, room)
        left += room - (waiting.pop(i - 1) if i else 0)
    return left


def _pairs(op: Operation) -> list[tuple[Value, Value]]:
    """Returns each output with the input that it may lie in."""
    is_one_to_one = len(op.inputs) == len(op.outputs)
    inputs = op.inputs if is_one_to_one else op.inputs[:1] * len(op.outputs)
    return list(zip(inputs, op.outputs, strict=True))
