"""Parses the text of a compiled XLA program into computations, instructions and arrays.

The text is the one interface to a compiled program that all backends and JAX versions share. Its
spelling differs between them, and this folder collects these differences. Only the parts that
predict/program/ and predict/time/ need are parsed. For example, the line

    %dot.3 = f32[8,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}

becomes an `Instruction` with name 'dot.3', opcode 'dot', type `Array('f32', (8, 64))`, operands
('x', 'w') and op_name 'jit(f)/dot'.
"""

import re
from collections.abc import Container, Mapping

import jax

from predict.program.instruction import Array, Instruction, Type
from predict.program.module import Module

_METADATA = re.compile(r'metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_TYPE_TOKEN = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?|[()]")
_HOST_MEMORY = "S(5)"


def text_of(compiled: jax.stages.Compiled) -> str:
    """Return the text of a compiled step."""
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "the backend provides no text for this compiled program (compiled.as_text() is None);"
            " audit the step on a CPU mesh of the same shape"
        )
    return text


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
    opcode_match = re.match(r"\s*([a-z][\w\-]*)\(", text[split:])
    if opcode_match is None:
        return None
    metadata = _METADATA.search(text)
    op_name = _OP_NAME.search(metadata[0]) if metadata else None
    # The metadata is removed because op_name contains names chosen by users, which may look like
    # attributes.
    attributes = _METADATA.sub("", text[split + opcode_match.end() :])
    called = [
        name.strip().lstrip("%")
        for match in _CALLED.finditer(attributes)
        for name in match[1].strip("{}").split(",")
    ]
    operands = _operands(attributes, types)
    return Instruction(
        name=name,
        opcode=opcode_match[1],
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
        text: text after the '(' that opens the list.
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
