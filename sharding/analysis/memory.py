"""Reads the memory of a compiled step, and finds its largest arrays.

XLA decides which arrays to keep, so this is not visible in the source of a step.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from sharding.analysis.hlo.instruction import Array, arrays_of, dtype_name
from sharding.analysis.hlo.parse import parse_modules, text_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a compiled step in bytes per device; None if the backend does not report it.

    Attributes:
        argument_bytes: the arguments.
        output_bytes: the results, including those that reuse the memory of donated arguments.
        alias_bytes: the part of output_bytes that reuses donated arguments.
        temp_bytes: all buffers allocated during the step.
        host_bytes: host memory for this device's arguments, results and temporary buffers.
    """

    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    host_bytes: int | None = None

    @property
    def in_all(self) -> int | None:
        """Total device memory, with reused arguments counted once."""
        added = (self.argument_bytes, self.output_bytes, self.temp_bytes)
        reused = self.alias_bytes
        known = [num_bytes for num_bytes in added if num_bytes is not None]
        return sum(known) - reused if len(known) == 3 and reused is not None else None


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the memory that the compiler planned for a step on one device."""
    stats = compiled.memory_analysis()

    def read(part: str) -> int | None:
        return getattr(stats, f"{part}_size_in_bytes", None)

    host = [read(f"host_{part}") for part in ("argument", "output", "temp", "alias")]
    known = [num_bytes for num_bytes in host if num_bytes is not None]
    return Memory(
        host_bytes=sum(known[:3]) - known[3] if len(known) == len(host) else None,
        argument_bytes=read("argument"),
        output_bytes=read("output"),
        alias_bytes=read("alias"),
        temp_bytes=read("temp"),
    )


def widest_arrays(
    compiled: jax.stages.Compiled, dtype: DTypeLike | None = None, count: int = 5
) -> list[tuple[Array, str]]:
    """Return the largest arrays of a step, each with the name of the operation that produces it.

    Args:
        compiled: the compiled step.
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
        for instruction in module.materialised()
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
        compiled: the compiled step.
        shape: per-device shape.
        dtype: element type of the array.
    """
    widest = widest_arrays(compiled, dtype, count=1)
    return bool(widest) and widest[0][0].num_elements >= math.prod(shape)
