"""Counts the bytes that a kernel moves to and from device memory."""

from collections.abc import Mapping, Sequence

from predict.program.instruction import Instruction, Type, arrays_of
from predict.program.module import Module

_SLICES = ("dynamic-slice", "slice", "gather")
#: Instructions whose result is their first operand with parts replaced -> the operand with the
#: parts.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


def moved_bytes(module: Module, instruction: Instruction) -> int:
    """Return the bytes that a kernel reads from and writes to device memory.

    If a fusion or another instruction slices an operand, only the slice is read. If its result is
    an operand with a part replaced, only that part is written. Workspaces of libraries do not
    count.
    """
    if instruction.opcode in _SLICES:
        return 2 * sum(array.bytes for array in arrays_of(instruction.type))
    if instruction.opcode in _UPDATES:
        return 2 * _update_bytes(instruction)
    if instruction.opcode not in ("fusion", "fusion-start") or not instruction.called:
        return array_bytes(instruction)
    body = module.computations.get(instruction.called[0], [])
    readers: dict[str, list[Instruction]] = {}
    for inner in body:
        for operand in dict.fromkeys(inner.operands):
            readers.setdefault(operand, []).append(inner)
    total = 0
    for parameter in (inner for inner in body if inner.opcode == "parameter"):
        total += _read_bytes(parameter, readers)
    root = body[-1] if body else instruction
    output = instruction.type if instruction.opcode == "fusion" else root.type
    updates = _updates(body)
    if updates and (root.opcode == "tuple" or root in updates):
        return total + sum(_update_bytes(update) for update in updates)
    return total + _result_bytes(instruction, output)


def _read_bytes(source: Instruction, readers: Mapping[str, list[Instruction]]) -> int:
    """Return the bytes that a fusion reads of a parameter, or of a slice or bitcast of one."""
    whole = sum(array.bytes for array in arrays_of(source.type))
    part = 0
    for reader in readers.get(source.name, []):
        if reader.opcode in (*_SLICES, "bitcast") and reader.name in readers:
            part += _read_bytes(reader, readers)  # perhaps of a slice of the slice
        elif reader.opcode in _SLICES:
            part += sum(array.bytes for array in arrays_of(reader.type))
        elif reader.opcode in _UPDATES and reader.operands[0] == source.name:
            part += 0  # updated in place, so the rest is not read
        else:
            return whole
    return min(part, whole)


def scatters_in_place(module: Module, instruction: Instruction) -> bool:
    """Return whether a fusion replaces parts of one of its operands at computed places.

    XLA's estimate for such a fusion is the time to copy the whole operand.
    """
    if instruction.opcode != "fusion" or not instruction.called:
        return False
    body = module.computations.get(instruction.called[0], [])
    return any(update.opcode == "scatter" for update in _updates(body))


def _updates(body: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions of a fusion that replace parts of an array.

    A scatter into an array that the fusion makes itself, such as zeros, writes all of it.
    """
    parameters = {inner.name for inner in body if inner.opcode == "parameter"}
    return [
        inner
        for inner in body
        if inner.opcode == "dynamic-update-slice"
        or (inner.opcode == "scatter" and inner.operands[0] in parameters)
    ]


def _update_bytes(update: Instruction) -> int:
    operand = update.operand_types[_UPDATES[update.opcode]]
    return sum(array.bytes for array in arrays_of(operand))


def array_bytes(instruction: Instruction) -> int:
    """Return the bytes of an instruction's operands and results."""
    operand_bytes = sum(array.bytes for t in instruction.operand_types for array in arrays_of(t))
    return operand_bytes + _result_bytes(instruction, instruction.type)


def _result_bytes(instruction: Instruction, result: Type) -> int:
    """Return the bytes of an instruction's results, excluding a library's workspace."""
    has_workspace = instruction.opcode == "custom-call" or '"__custom' in instruction.attributes
    kinds = ("s8", "u8") if has_workspace else ()
    return sum(array.bytes for array in arrays_of(result) if array.dtype not in kinds)
