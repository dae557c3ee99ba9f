"""Parses the text of a compiled XLA program into computations, instructions and arrays.

The text is the one interface to a compiled program that all backends and JAX versions share. Its
spelling differs between them, and this module collects these differences. Only the parts that
sharding/analysis/ needs are parsed. For example, the line

    %dot.3 = f32[8,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}

becomes an `Instruction` with name 'dot.3', opcode 'dot', type `Array('f32', (8, 64))`, operands
('x', 'w') and op_name 'jit(f)/dot'.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import numpy as np
from jax.typing import DTypeLike


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
        attributes: the text after the opcode, without metadata.
        called: names of the computations that it calls, in text order.
        op_name: the traced operation that it comes from, '' if XLA does not say.
    """

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    operand_types: tuple[Type, ...]
    attributes: str
    called: tuple[str, ...]
    op_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed program.

    Attributes:
        entry: name of the computation that runs first.
        num_partitions: number of devices that one run of the program spans; 1 if the text does not
            say.
        computations: the instructions of each computation, by the computation's name.
    """

    entry: str
    num_partitions: int
    computations: dict[str, list[Instruction]]

    def in_loops(
        self, is_wanted: Callable[[Instruction], bool]
    ) -> list[tuple[Instruction, tuple[int | None, ...]]]:
        """Return the selected instructions that run, with the trip counts of the loops around them.

        Args:
            is_wanted: selects instructions. Computations that a selected instruction calls are not
                searched.

        Returns:
            (instruction, trip counts) pairs in program order. Trip counts are listed from the
            outermost loop inwards, and are None if XLA does not know them. If a computation is
            called twice, its instructions are listed twice.
        """
        return [
            (instruction, tuple(trip_count(loop) for loop in loops))
            for instruction, loops in self.under_loops(is_wanted)
        ]

    def under_loops(
        self, is_wanted: Callable[[Instruction], bool]
    ) -> list[tuple[Instruction, tuple[Instruction, ...]]]:
        """Like `in_loops`, but with the `while` instructions themselves, outermost first."""

        @functools.cache
        def under(name: str) -> list[tuple[Instruction, tuple[Instruction, ...]]]:
            found: list[tuple[Instruction, tuple[Instruction, ...]]] = []
            for instruction in self.computations.get(name, []):
                if is_wanted(instruction):
                    found.append((instruction, ()))
                    continue
                loops = (instruction,) if instruction.opcode == "while" else ()
                for called in instruction.called:
                    found += [(inner, loops + around) for inner, around in under(called)]
            return found

        return under(self.entry)

    def loop_bodies(self) -> list[list[Instruction]]:
        """Return the instructions of the body of each while loop."""
        loops = [i for body in self.computations.values() for i in body if i.opcode == "while"]
        names = dict.fromkeys(map(body_of, loops))
        return [self.computations[name] for name in names if name in self.computations]

    def reaches(self, instruction: Instruction, is_wanted: Callable[[Instruction], bool]) -> bool:
        """Return whether an instruction, or any instruction that it calls, is selected."""
        return is_wanted(instruction) or any(
            self.reaches(inner, is_wanted)
            for called in instruction.called
            for inner in self.computations.get(called, [])
        )

    def materialised(self) -> Iterator[Instruction]:
        """Yield the instructions whose results are stored in memory, so none inside fusions."""
        seen = {self.entry}
        waiting = [self.entry]
        while waiting:
            for instruction in self.computations.get(waiting.pop(), []):
                yield instruction
                called = set() if instruction.opcode == "fusion" else {*instruction.called} - seen
                seen |= called
                waiting += called


_METADATA = re.compile(r'metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_AFTER = re.compile(r"\bcontrol-predecessors=\{([^}]*)\}")
_TYPE_TOKEN = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?|[()]")
_HOST_MEMORY = "S(5)"


def parse_modules(text: str) -> list[Module]:
    """Parse the programs in the text of a compiled step.

    Raises:
        ValueError: if the text contains no program.
    """
    modules = [_parse_module(part) for part in re.split(r"(?m)^(?=HloModule )", text)]
    modules = [module for module in modules if module is not None]
    if not modules:
        raise ValueError(
            f"the text of a compiled program has an ENTRY computation, but {text[:80]!r} has none;"
            " pass the result of jax.jit(f).lower(...).compile()"
        )
    return modules


def _parse_module(text: str) -> Module | None:
    computations: dict[str, list[Instruction]] = {}
    entry = None
    instructions: list[Instruction] = []
    types: dict[str, Type] = {}  # output types of the computation so far
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = computations.setdefault(header[2], [])
            types = {}
            entry = header[2] if header[1] else entry
        elif parts := _INSTRUCTION.match(line):
            instruction = _parse_instruction(parts[1], parts[2], types)
            if instruction is not None:
                instructions.append(instruction)
                types[instruction.name] = instruction.type
    if entry is None:
        return None
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    return Module(
        entry=entry,
        num_partitions=int(partitions[1]) if partitions else 1,
        computations=computations,
    )


def _parse_instruction(name: str, text: str, types: Mapping[str, Type]) -> Instruction | None:
    text = re.sub(r"/\*.*?\*/", "", text)  # XLA numbers long tuples with comments: /*index=5*/
    split = _end_of_type(text)
    rest = re.match(r"\s*([a-z][\w\-]*)\(", text[split:])
    if rest is None:
        return None
    metadata = _METADATA.search(text)
    op_name = _OP_NAME.search(metadata[0]) if metadata else None
    # The metadata is removed because op_name contains names chosen by users, which may look like
    # attributes.
    attributes = _METADATA.sub("", text[split + rest.end() :])
    called = [
        name.strip().lstrip("%")
        for match in _CALLED.finditer(attributes)
        for name in match[1].strip("{}").split(",")
    ]
    operands = _operands(attributes, types)
    return Instruction(
        name=name,
        opcode=rest[1],
        type=parse_type(text[:split]),
        operands=tuple(operands),
        operand_types=tuple(types[operand] for operand in operands),
        attributes=attributes,
        called=tuple(name for name in called if name),
        op_name=op_name[1] if op_name else "",
    )


def _operands(text: str, known: Container[str]) -> list[str]:
    """Return the known names in a list of operands.

    An operand is written as '%name', 'name' or 'f32[8,16]{1,0} %name'.

    Args:
        text: the text after the '(' that opens the list.
        known: names of instructions; other words, such as types, are skipped.
    """
    depth = 0
    end = len(text)
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            end = index
            break
    names = re.findall(r"[\w.\-]+", re.sub(r"\{[^{}]*\}", "", text[:end]))
    return [name for name in names if name in known]


def _end_of_type(text: str) -> int:
    """Return the index just after the output type at the start of a right-hand side."""
    if not text.startswith("("):
        return len(text.split(maxsplit=1)[0]) if text.strip() else 0
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return len(text)


def parse_type(text: str) -> Type:
    """Parse an output type such as 'f32[4,16]{1,0}' or '(f32[8]{0}, (u32[], token[]))'."""
    # The token of an array includes its layout, because the tiles of a layout, as in
    # {1,0:T(8,128)}, look like tuples.
    stack: list[list[Type]] = [[]]
    for token in _TYPE_TOKEN.finditer(text):
        if token[0] == "(":
            stack.append([])
        elif token[0] == ")":
            inner = tuple(stack.pop())
            stack[-1].append(inner)
        else:
            # '<=5' is a dynamic dim of at most 5, '?' one without a bound.
            sizes = (size.strip().removeprefix("<=") for size in token[2].split(","))
            shape = tuple(int(size) for size in sizes if size.isdigit())
            stack[-1].append(Array(token[1], shape, _HOST_MEMORY in (token[3] or "")))
    return stack[0][0] if stack[0] else ()


def arrays_of(output: Type) -> Iterator[Array]:
    """Yield the arrays of an output type, flattening tuples."""
    if isinstance(output, Array):
        yield output
    else:
        for part in output:
            yield from arrays_of(part)


def dependencies(body: Sequence[Instruction]) -> dict[str, frozenset[str]]:
    """Return the names of all instructions that must finish before each one can begin.

    Args:
        body: the instructions of one computation, in program order.

    Returns:
        Instruction name -> its direct and indirect predecessors, by data and control dependency.
    """
    found: dict[str, frozenset[str]] = {}
    for instruction in body:
        after = _AFTER.search(instruction.attributes)
        names = re.findall(r"[\w.\-]+", after[1]) if after else []
        direct = [name for name in (*instruction.operands, *names) if name in found]
        found[instruction.name] = frozenset(direct).union(*(found[name] for name in direct))
    return found


def matmul_flops(instruction: Instruction) -> int | None:
    """Return the FLOPs of a matrix product or a convolution, or None for other instructions.

    A multiply-add is two FLOPs, so a dot has 2·M·N·K per batch element. Multiplications by the
    zeros that a convolution pads with or inserts between elements do not count. Calls of cuBLAS,
    of cuDNN's convolutions and of oneDNN's products count as the products that they compute; a
    library's fused attention does not count.
    """
    name = custom_call_target(instruction) or instruction.opcode
    operands = [next(arrays_of(t), Array("f32", ())) for t in instruction.operand_types[:2]]
    output = next(arrays_of(instruction.type), Array("f32", ()))
    if name == "dot" or name.startswith("__cublas$"):
        dims = _LHS_CONTRACTING.search(instruction.attributes)
        sizes = [operands[0].shape[int(d)] for d in re.findall(r"\d+", dims[1])] if dims else []
        return 2 * output.num_elements * math.prod(sizes)
    if name == "__onednn$matmul":
        # The left operand has M·K elements and the output M·N, whether transposed or not.
        return 2 * operands[0].num_elements * output.shape[-1]
    if name == "convolution" or name.startswith("__cudnn$convForward"):
        return _convolution_flops(instruction.attributes, operands[0], operands[1], output)
    # For a convolution's gradient, cuDNN's call has the attributes of the forward convolution.
    if name == "__cudnn$convBackwardInput":
        return _convolution_flops(instruction.attributes, output, operands[1], operands[0])
    if name == "__cudnn$convBackwardFilter":
        return _convolution_flops(instruction.attributes, operands[0], output, operands[1])
    return None


_LHS_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)')


def _convolution_flops(attributes: str, image: Array, kernel: Array, output: Array) -> int:
    """Return the FLOPs of a convolution from its `dim_labels` and `window`.

    Args:
        attributes: text with e.g. `dim_labels=b01f_01io->b01f` and `window={size=3x3 stride=2x2}`.
        image: input of the forward convolution.
        kernel: its weights.
        output: its output.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None
    window = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(field.split("=") for field in window[1].split()) if window else {}
    products = output.shape[labels[3].index("b")] * output.shape[labels[3].index("f")]
    products *= kernel.shape[labels[2].index("i")]
    for i, label in enumerate(sorted(set(labels[2]) - {"i", "o"})):
        # Count the (output position, kernel position) pairs of this dim that read an input element
        # rather than padding or a zero inserted by dilation.
        size = image.shape[labels[1].index(label)]
        stride, image_dilation, kernel_dilation = (
            int(given[name].split("x")[i]) if name in given else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(given["pad"].split("x")[i].split("_")[0]) if "pad" in given else 0
        starts = np.arange(output.shape[labels[3].index(label)])[:, None] * stride - low
        at = starts + np.arange(kernel.shape[labels[2].index(label)]) * kernel_dilation
        inside = (at >= 0) & (at <= (size - 1) * image_dilation) & (at % image_dilation == 0)
        products *= int(inside.sum())
    return 2 * products


def trip_count(loop: Instruction) -> int | None:
    """Return how often the body of a `while` instruction runs, or None if XLA does not know."""
    found = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', loop.attributes)
    return int(found[1]) if found else None


def body_of(loop: Instruction) -> str:
    """Return the name of the computation that a `while` instruction repeats."""
    found = _BODY.search(loop.attributes)
    return found[1] if found else ""


def custom_call_target(instruction: Instruction) -> str:
    """Return the library function that a `custom-call` runs, or '' for other instructions."""
    if instruction.opcode != "custom-call":
        return ""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found[1] if found else ""


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


_WRAPPED = re.compile(r"(?:jvp|transpose|vmap|rematted_computation)\((.*)\)")
# Path components that JAX itself inserts.
_NO_SCOPE = re.compile(
    r"|body|cond|closed_call|core_call|eval_jaxpr|shard_map|checkpoint|remat2?|pjit|while|scan"
    r"|branch_\d+_fun|custom_(jvp|vjp)_call(_jaxpr)?|jit\(.*\)|rematted_computation|main.*"
)


def dtype_name(dtype: DTypeLike) -> str:
    """Return XLA's name of an element type, such as 'f32' for float32."""
    name = np.dtype(dtype).name
    if name == "bool":
        return "pred"
    for prefix, short in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "s"),
        ("complex", "c"),
    ):
        if name.startswith(prefix):
            return (short + name.removeprefix(prefix)).replace("_", "")
    return name
