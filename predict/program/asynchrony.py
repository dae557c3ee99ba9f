"""Finds the asynchronous work of a scheduled GPU program: collectives and host copies.

The instructions of a compiled GPU program are listed in the order in which they are issued. A
*start* instruction hands work to a stream other than the compute stream, and the matching *done*
instruction waits for it. Kernels issued between the two run at the same time as that work:

    all-gather-start   hands the transfer to the collective stream
    fusion             runs on the compute stream, at the same time as the transfer
    all-gather-done    the compute stream waits here until the transfer has finished

XLA writes start instructions in several ways:

    %s = (f32[8], f32[64]) all-gather-start(%x), ...                 an opcode of its own
    %s = ((f32[64]), f32[8], u32[]) async-start(%x), calls=%wrapped  wraps any instruction
    %s = (...) reduce-scatter-start(%x), async_execution_thread=...  the same, abbreviated
    %s = (...) fusion-start(%x), calls=%fused                        a fusion, such as a slice of
                                                                     an array in host memory
    %s = (...) copy-start(%x), send(%x), recv(...)
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from predict.program.instruction import Array, Instruction, Type, arrays_of
from predict.program.module import Module

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
#: Instructions that do no work of their own: they name, group or reinterpret existing arrays.
NO_WORK = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency domain "
    "opt-barrier optimization-barrier partition-id replica-id".split()
)
_WITHOUT_SUFFIX = ("send", "recv")  # starts, although their names have no "-start" suffix

Direction = Literal["to host", "to device"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTransfer:
    """A transfer between a device and its host.

    Attributes:
        direction: "to host" or "to device".
        bytes: bytes that one device transfers in one execution.
    """

    direction: Direction
    bytes: int


def is_start(instruction: Instruction) -> bool:
    """Return whether an instruction starts work that another instruction waits for."""
    return instruction.opcode.endswith("-start") or instruction.opcode in _WITHOUT_SUFFIX


def is_done(instruction: Instruction) -> bool:
    """Return whether an instruction waits for work that another instruction started."""
    return instruction.opcode.endswith("-done")


def collective_kind(instruction: Instruction) -> str | None:
    """Return the kind of a collective, or None if the instruction is not a collective.

    A start has the kind of its synchronous form. XLA may split a permutation into a send and a
    receive; only the send is counted. An `async-start` is not counted itself: the collective that
    it wraps is in the computation that it calls (see `wrapped_collective`).

    Args:
        instruction: any instruction.

    Returns:
        One of `COLLECTIVES`, or None.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "send" and "source_target_pairs" in instruction.attributes:
        return "collective-permute"
    return opcode if opcode in COLLECTIVES else None


def wrapped_collective(module: Module, start: Instruction) -> Instruction | None:
    """Return the collective that an `async-start` wraps, or None if it wraps no collective."""
    if start.opcode != "async-start":
        return None
    inner = (i for called in start.called for i in module.computations.get(called, []))
    return next((i for i in inner if collective_kind(i)), None)


def result_of(instruction: Instruction) -> Type:
    """Return the type of a collective's result, without the operands that starts carry along."""
    output = instruction.type
    if isinstance(output, Array):
        return output
    if instruction.opcode == "send":
        return output[0]
    # Most starts have the type (operands, results, ...). An all-reduce-start of older XLA versions
    # has only its results as type; in newer versions it is an abbreviated async-start, which holds
    # its operands in a tuple.
    if not instruction.opcode.endswith("-start"):
        return output
    if instruction.opcode == "all-reduce-start" and isinstance(output[0], Array):
        return output
    return output[1]


def is_marked_synchronous(instruction: Instruction) -> bool:
    """Return whether XLA runs a start-done pair synchronously, on the compute stream."""
    return '"is_sync":true' in instruction.attributes.replace(" ", "")


def host_copy(instruction: Instruction) -> HostTransfer | None:
    """Return the transfer between device and host memory that an instruction performs.

    Slicing an array in host memory transfers only the slice, and updating a part of such an array
    transfers only the update.

    Args:
        instruction: any instruction.

    Returns:
        The transfer, or None if the instruction transfers nothing.
    """
    if instruction.opcode in NO_WORK or is_done(instruction):
        return None
    if instruction.opcode in ("while", "conditional", "call"):
        return None
    operands = [array for t in instruction.operand_types for array in arrays_of(t)]
    results = list(arrays_of(instruction.type))
    if is_start(instruction) and not isinstance(instruction.type, Array):
        # Asynchronous forms have the type (operands, result, context), except for a copy-start:
        # (result, operand, context).
        results = list(arrays_of(instruction.type[0 if instruction.opcode == "copy-start" else 1]))
    to_host = [array for array in results if array.on_host]
    from_host = [array for array in operands if array.on_host]
    on_device = [array for array in operands if not array.on_host]
    if to_host and on_device:
        num_bytes = max(array.bytes for array in on_device)
        return HostTransfer(direction="to host", bytes=num_bytes) if num_bytes else None
    if from_host and not to_host:
        num_bytes = sum(array.bytes for array in results)
        return HostTransfer(direction="to device", bytes=num_bytes) if num_bytes else None
    return None


def overlapped_starts(module: Module) -> set[str]:
    """Return the names of all starts that overlap with a kernel or a loop before their done."""
    return {name for body in module.computations.values() for name in _overlapped_in(body)}


def _overlapped_in(body: list[Instruction]) -> Iterator[str]:
    """Yield the starts of one computation that have kernels or loops before their done."""
    started: dict[str, int] = {}  # start -> number of kernels issued before it
    num_kernels = 0
    for instruction in body:
        if is_done(instruction):
            for name in instruction.operands:
                if name in started and num_kernels > started[name]:
                    yield name
        elif is_start(instruction):
            started[instruction.name] = num_kernels
        elif instruction.opcode.endswith("-update"):  # passes a start's handle on
            for name in instruction.operands:
                if name in started:
                    started[instruction.name] = started[name]
        elif instruction.opcode not in NO_WORK and not collective_kind(instruction):
            num_kernels += 1
