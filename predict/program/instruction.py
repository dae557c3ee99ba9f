"""Data types of a compiled XLA program's text: instructions, and the arrays that they return.

Some facts about an instruction are only found in the text of its attributes: how often a loop runs,
the function that it was traced in, the library function that it calls. They are read here too.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from sharding.labels import expected_trips_of
from sharding.ops.update_if import AT_MOST_ONCE


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's output, as stored on one device.

    Attributes:
        dtype: XLA's name of the element type: 'f32', 'bf16', 's32', 'pred', 'f8e4m3fn', ...
        shape: per-device size of each dim.
        on_host: whether it is stored in host memory, which is XLA's memory space 5.
    """

    dtype: str
    shape: tuple[int, ...]
    on_host: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements stored on one device."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes stored on one device; 0 for tokens and other types without data."""
        if self.dtype == "pred":
            return self.num_elements
        # The first number in a type's name is its width in bits, even in 'bf16' and 'f8e4m3fn'.
        bits = re.search(r"\d+", self.dtype)
        return math.ceil(self.num_elements * int(bits[0]) / 8) if bits else 0


# An instruction's output type: an array, or a tuple of types.
Type = Array | tuple["Type", ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: its name in the program, without '%'.
        opcode: 'all-reduce', 'while', 'fusion', ...
        type: output type.
        operands: names of the instructions whose results it reads.
        operand_types: output types of these instructions.
        attributes: text after the opcode, without metadata.
        called: names of the computations that it calls, in text order.
        op_name: traced operation that it comes from, '' if XLA does not say.
    """

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    operand_types: tuple[Type, ...]
    attributes: str
    called: tuple[str, ...]
    op_name: str


_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_WRAPPED = re.compile(r"(?:jvp|transpose|vmap|rematted_computation)\((.*)\)")
# Path components that JAX itself inserts.
_NO_SCOPE = re.compile(
    r"|body|cond|closed_call|core_call|eval_jaxpr|shard_map|checkpoint|remat2?|pjit|while|scan"
    r"|branch_\d+_fun|custom_(jvp|vjp)_call(_jaxpr)?|jit\(.*\)|rematted_computation|main.*"
)


def arrays_of(output: Type) -> Iterator[Array]:
    """Yield the arrays of an output type, flattening tuples."""
    if isinstance(output, Array):
        yield output
    else:
        for part in output:
            yield from arrays_of(part)


def trip_count(loop: Instruction, expert_load: float = 1.0) -> float | None:
    """Return how often the body of a `while` instruction runs, or None if nobody knows.

    Where XLA does not know it, it is the mean count that the program expects for a load of experts;
    see sharding/labels.py.
    """
    match = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', loop.attributes)
    return int(match[1]) if match else expected_trips_of(loop_label(loop), expert_load)


def executions(loops: Sequence[Instruction]) -> int | None:
    """Return how often the body of nested loops runs in all, or None if a count is unknown."""
    counts = [trip_count(loop) for loop in loops]
    known = [int(count) for count in counts if count is not None]
    return math.prod(known) if len(known) == len(counts) else None


def repeats(instruction: Instruction) -> bool:
    """Return whether an instruction is a loop, other than one that runs at most once.

    Such a loop (sharding/ops/update_if.py) is a branch of the program.
    """
    return instruction.opcode == "while" and loop_label(instruction) != AT_MOST_ONCE


def body_of(loop: Instruction) -> str:
    """Return the name of the computation that a `while` instruction repeats."""
    match = _BODY.search(loop.attributes)
    return match[1] if match else ""


def loop_label(loop: Instruction) -> str:
    """Return the `jax.named_scope` in which a loop was traced, or '' if there is none.

    JAX writes the path of a loop as '.../shard_map/layers/while', or as
    '.../transpose(jvp(layers))/while' if it is differentiated; both have the label 'layers'.
    """
    path = loop.op_name.split("/")
    if "while" not in path:
        return ""
    last = len(path) - 1 - path[::-1].index("while")
    scope = path[last - 1] if last else ""
    while wrapped := _WRAPPED.fullmatch(scope):
        scope = wrapped[1]
    return "" if _NO_SCOPE.fullmatch(scope) else scope


def custom_call_target(instruction: Instruction) -> str:
    """Return the library function that a `custom-call` runs, or '' for other instructions."""
    if instruction.opcode != "custom-call":
        return ""
    match = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return match[1] if match else ""
