"""Estimates the memory and the work of a traced step on one device, before it is compiled.

The estimator runs the step's program (operations.py) once, with sizes instead of numbers
(interpreter.py). An output is allocated when its operation runs and freed after its last use, and
the estimate is the largest total at any time. For example, `y = x + tanh(x @ w1) @ w2` has donated
float32 inputs x [512, 512], w1 [512, 2048] and w2 [2048, 512]:

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
give them (packing.py); weight gradients are computed late (late_products.py). XLA's own additions
are not modelled: copies that change a layout, and other operations that its scheduler moves.

Two habits of XLA's CPU compilers are modelled as well. They do not fuse reductions with the
operations that compute their inputs, so these inputs are allocated. And an input that is updated in
place but is also read by another fusion is copied first, which leaves its own memory free for other
buffers in the meantime. Elsewhere, reductions are fused, and so are all readers of such an input.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from predict.memory.interpreter import Interpreter
from predict.memory.operations import Program
from predict.memory.packing import most_bytes_at_once, packed_bytes
from predict.memory.passes.counted_slices import counted_slices
from predict.memory.passes.simplify import simplify
from predict.memory.step_cost import StepCost
from sharding.labels import GAPS, TEMPORARIES

#: For CPUs: gaps between arrays of different lifetimes, as a share of the arrays that a step has
#: allocated at its peak. The mean of 21 compiled steps of five models (docs/memory.md).
GAPS_SHARE = 0.08
#: For GPUs, where gaps are computed: the same share for XLA's scheduler, which computes some arrays
#: earlier than they are needed, or reads them later. With it, the mean of the steps in
#: docs/memory.md is 3 % too high: an estimate that is too low would let a run fail later.
GPU_GAPS_SHARE = 0.03
#: Arrays smaller than this share of all arrays allocated at the peak leave no gaps worth computing.
_MIN_PACKED_SHARE = 1 / 2000


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
        program: program, from `open_jaxpr`.
        labels: one label per input.
        mesh_shape: sizes of the mesh axes.
        platform: platform of the devices, such as "cpu" or "gpu".
    """
    if platform != "cpu":
        program = simplify(program)
    run = Interpreter(mesh_shape, platform, counted_slices(program, mesh_shape))
    inputs = []
    for value, label in zip(program.inputs, labels, strict=True):
        storage = run.memory.allocate(value, label)
        storage.buffers[0].is_input = True
        inputs.append(storage)
    run.program(program, inputs, len(program.outputs), is_whole=True)
    at_peak = {on_host: collections.Counter() for on_host in (False, True)}
    for on_host, buffers in run.memory.at_peak.items():
        for buffer in buffers:
            at_peak[on_host][buffer.label] += buffer.num_bytes
    non_input_bytes = [
        buffer.num_bytes for buffer in run.memory.at_peak[False] if not buffer.is_input
    ]
    # While a copied input's own memory is free, temporaries use it: count only the rest.
    at_peak[False][TEMPORARIES] += _unused_bytes(run.copied, non_input_bytes)
    if platform == "cpu":
        gaps = GAPS_SHARE * sum(non_input_bytes)
    else:
        large = run.memory.lifetimes(at_least=_MIN_PACKED_SHARE * sum(non_input_bytes))
        gaps = (
            packed_bytes(large) - most_bytes_at_once(large) + GPU_GAPS_SHARE * sum(non_input_bytes)
        )
    at_peak[False][GAPS] = round(gaps)
    return Estimate(device=at_peak[False], host=at_peak[True], work=run.work)


def _unused_bytes(rooms: Sequence[int], guests: Sequence[int]) -> int:
    """Return the bytes of rooms that stay empty when guests move in.

    Rooms are filled in order of size, the largest first; each takes the largest guest that fits.
    """
    waiting = sorted(guests)
    left = 0
    for room in sorted(rooms, reverse=True):
        i = bisect.bisect_right(waiting, room)
        left += room - (waiting.pop(i - 1) if i else 0)
    return left
