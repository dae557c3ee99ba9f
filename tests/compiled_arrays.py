"""Finds the arrays that a compiled step stores in memory.

XLA decides which arrays to keep, so this is not visible in the source of a step.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from predict.program.instruction import Array, Instruction, arrays_of
from predict.program.module import Module
from predict.program.parse import parse_modules, text_of


def widest_arrays(
    compiled: jax.stages.Compiled, dtype: DTypeLike | None = None, count: int = 5
) -> list[tuple[Array, str]]:
    """Return the largest arrays of a step, each with the name of the operation that produces it.

    Args:
        compiled: compiled step.
        dtype: only consider arrays of this element type; None considers all.
        count: maximum number of arrays to return.

    Returns:
        (array, name) pairs, the largest first, with per-device shapes. Arguments are included;
        values that exist only inside a fused kernel are not.
    """
    wanted = None if dtype is None else dtype_name(dtype)
    found = {
        (array, instruction.op_name or instruction.name)
        for module in parse_modules(text_of(compiled))
        for instruction in materialised(module)
        for array in arrays_of(instruction.type)
        if wanted in (None, array.dtype)
    }
    order = sorted(found, key=lambda item: (-item[0].num_elements, item[0].shape, item[1]))
    return order[:count]


def has_array(compiled: jax.stages.Compiled, shape: Sequence[int], dtype: DTypeLike) -> bool:
    """Return whether a step holds an array of this dtype at least as large as a shape.

    Only numbers of elements per device are compared, because XLA reshapes freely. Arguments count
    too, so choose sizes at which no parameter has as many elements as the array in question.

    Args:
        compiled: compiled step.
        shape: per-device shape.
        dtype: element type of the array.
    """
    widest = widest_arrays(compiled, dtype, count=1)
    return bool(widest) and widest[0][0].num_elements >= math.prod(shape)


def materialised(module: Module) -> Iterator[Instruction]:
    """Yield the instructions whose results are stored in memory, so none inside fusions."""
    seen = {module.entry}
    waiting = [module.entry]
    while waiting:
        for instruction in module.computations.get(waiting.pop(), []):
            yield instruction
            called = set() if instruction.opcode == "fusion" else {*instruction.called} - seen
            seen |= called
            waiting += called


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
