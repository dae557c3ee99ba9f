"""What runs asynchronously in a scheduled program: collectives, copies to and from the host.

The instructions of a compiled GPU program are in the order in which they are issued. A start gives
work to a stream beside that of the kernels, and the matching done waits for it; kernels between the
two run at the same time. XLA spells this in several ways:

    %s = (f32[8], f32[64]) all-gather-start(%x), ...                 its own pair of opcodes
    %s = ((f32[64]), f32[8], u32[]) async-start(%x), calls=%wrapped  any instruction, wrapped
    %s = (...) reduce-scatter-start(%x), async_execution_thread=...  the same, abbreviated
    %s = (...) fusion-start(%x), calls=%fused                        a fusion, such as a slice of
                                                                     an array in host memory
    %s = (...) copy-start(%x), send(%x), recv(...)
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from sharding.analysis import hlo

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
#: Instructions without work of their own: they name, bundle or reinterpret what is there.
NO_WORK = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency domain "
    "opt-barrier optimization-barrier partition-id replica-id".split()
)
_WITHOUT_SUFFIX = ("send", "recv")  # these two are starts by themselves

Direction = Literal["to host", "to device"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTransfer:
    """What an instruction moves between a device and its host.

    Attributes:
      direction: "to host" or "to device".
      bytes: of one device in one execution.
    """

    direction: Direction
    bytes: int


def is_start(instruction: hlo.Instruction) -> bool:
    """Whether an instruction starts work that another one waits for."""
    return instruction.opcode.endswith("-start") or instruction.opcode in _WITHOUT_SUFFIX


def is_done(instruction: hlo.Instruction) -> bool:
    """Whether an instruction waits for work that another one started."""
    return instruction.opcode.endswith("-done")


def collective_kind(instruction: hlo.Instruction) -> str | None:
    """One of `COLLECTIVES`, under which its start counts too; None of anything else.

    A permutation that XLA split into send and receive counts once, as the send. A collective that
    an `async-start` wraps is in the computation that this calls.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "send" and "source_target_pairs" in instruction.attributes:
        return "collective-permute"
    return opcode if opcode in COLLECTIVES else None


def wrapped_collective(module: hlo.Module, start: hlo.Instruction) -> hlo.Instruction | None:
    """The collective that an `async-start` wraps, None if it wraps none."""
    if start.opcode != "async-start":
        return None
    inner = (i for called in start.called for i in module.computations.get(called, []))
    return next((i for i in inner if collective_kind(i)), None)


def result_of(instruction: hlo.Instruction) -> hlo.Type:
    """The type of what a collective yields, without operands that asynchronous forms carry."""
    output = instruction.type
    if isinstance(output, hlo.Array):
        return output
    if instruction.opcode == "send":
        return output[0]
    # Starts yield (operands, results, ...). all-reduce-start of older versions yields its results
    # alone; that of newer ones, an abbreviated async-start, has its operands as a tuple.
    if not instruction.opcode.endswith("-start"):
        return output
    if instruction.opcode == "all-reduce-start" and isinstance(output[0], hlo.Array):
        return output
    return output[1]


def is_marked_synchronous(instruction: hlo.Instruction) -> bool:
    """Whether XLA runs a collective on the kernels' own stream although it wrote a start."""
    return '"is_sync":true' in instruction.attributes.replace(" ", "")


def host_copy(instruction: hlo.Instruction) -> HostTransfer | None:
    """What an instruction moves to or from host memory, None if it moves nothing.

    A slice of an array in host memory moves the slice, and an update of such an array the update.
    """
    if instruction.opcode in NO_WORK or is_done(instruction):
        return None
    if instruction.opcode in ("while", "conditional", "call"):
        return None
    given = [array for t in instruction.operand_types for array in hlo.arrays_of(t)]
    made = list(hlo.arrays_of(instruction.type))
    if is_start(instruction) and not isinstance(instruction.type, hlo.Array):
        # (operands, result, context) of asynchronous forms; (result, operand, context) of a copy.
        made = list(hlo.arrays_of(instruction.type[0 if instruction.opcode == "copy-start" else 1]))
    to_host = [array for array in made if array.on_host]
    from_host = [array for array in given if array.on_host]
    on_device = [array for array in given if not array.on_host]
    if to_host and on_device:
        num_bytes = max(array.bytes for array in on_device)
        return HostTransfer(direction="to host", bytes=num_bytes) if num_bytes else None
    if from_host and not to_host:
        num_bytes = sum(array.bytes for array in made)
        return HostTransfer(direction="to device", bytes=num_bytes) if num_bytes else None
    return None


def overlapped(module: hlo.Module) -> set[str]:
    """The names of the starts between which and their dones some kernel, or a loop, runs."""
    return {name for body in module.computations.values() for name in _overlapped_in(body)}


def _overlapped_in(body: list[hlo.Instruction]) -> Iterator[str]:
    """Yields the starts of one computation that have work beside them."""
    started: dict[str, int] = {}  # name of a start -> kernels issued before it
    num_kernels = 0
    for instruction in body:
        if is_done(instruction):
            for name in instruction.operands:
                if name in started and num_kernels > started[name]:
                    yield name
        elif is_start(instruction):
            started[instruction.name] = num_kernels
        elif instruction.opcode.endswith("-update"):  # a start's handle passed on
            for name in instruction.operands:
                if name in started:
                    started[instruction.name] = started[name]
        elif instruction.opcode not in NO_WORK and not collective_kind(instruction):
            num_kernels += 1
