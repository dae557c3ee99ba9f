"""Reads what XLA added to a compiled step: collectives, host copies, large arrays, memory.

XLA decides where to communicate and which arrays to keep, so neither is visible in the source of a
step. Promises such as "no gradient all-reduce inside the microbatch loop" are therefore checked on
the compiled program:

    compiled = jax.jit(train_step).lower(state, batch).compile()
    print(format_table(summary(collectives(compiled, mesh))))
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.typing import DTypeLike

from sharding.analysis import asynchrony, device_groups, hlo

KINDS = asynchrony.COLLECTIVES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a compiled step.

    Attributes:
        kind: one of `KINDS`. An asynchronous start-done pair counts once, under the kind of its
            synchronous form. A permutation that XLA split into a send and a receive is a
            'collective-permute'.
        axes: the mesh axes, in mesh order, along which the devices of one group differ; empty if
            every group is a single device.
        loop_depth: number of while loops around it; a `jax.lax.scan` compiles to one.
        trip_count: executions per step, the product of the trip counts of the loops around it. 1
            outside loops, None if one of these trip counts is unknown. A collective in a branch of
            a conditional counts as if that branch were always taken.
        bytes: bytes of its output on one device in one execution.
        name: its name in the compiled program.
        op_name: the traced operation that it comes from, '' if unknown.
        is_async: whether it runs on a stream of its own, so that kernels can run at the same time.
        is_overlapped: whether a kernel or a loop is issued between its start and its done.
        loop: label of the innermost loop around it: the named scope in which the loop was traced,
            such as 'layers', or else 'loop 2' at a depth of 2; '' outside loops.
    """

    kind: str
    axes: tuple[str, ...]
    loop_depth: int
    trip_count: int | None
    bytes: int
    name: str
    op_name: str = ""
    is_async: bool = False
    is_overlapped: bool = False
    loop: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCopy:
    """One copy between a device and its host in a compiled step.

    Attributes:
        direction: 'to host' or 'to device'.
        trip_count: as in `Collective`.
        bytes: bytes that one device transfers in one execution.
        name: its name in the compiled program.
        is_async: as in `Collective`.
        is_overlapped: as in `Collective`.
        loop: as in `Collective`.
    """

    direction: asynchrony.Direction
    trip_count: int | None
    bytes: int
    name: str
    is_async: bool
    is_overlapped: bool
    loop: str


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A permutation, or an instruction with matrix products, in one iteration of a loop.

    Attributes:
        name: its name in the compiled program.
        pairs: (source, target) devices of every transfer of a permutation; () for other tasks.
        needs: names of the tasks of the same iteration that must finish before this one can begin,
            because it uses their results directly or through other instructions.
    """

    name: str
    pairs: tuple[tuple[int, ...], ...]
    needs: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """All collectives with the same kind, mesh axes and loop depth.

    Attributes:
        kind: as in `Collective`.
        axes: as in `Collective`.
        loop_depth: as in `Collective`.
        count: number of such instructions in the program.
        bytes: bytes of output on one device if each of them is executed once.
        bytes_per_step: bytes of output on one device in a step, with the executions of loops
            counted; None if a trip count is unknown.
    """

    kind: str
    axes: tuple[str, ...]
    loop_depth: int
    count: int
    bytes: int
    bytes_per_step: int | None


def collectives(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[Collective]:
    """Return the collectives of a compiled step, in program order.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`.
        mesh: the mesh that it was compiled for.

    Returns:
        One entry per instruction.

    Raises:
        ValueError: if the program and the mesh differ in their number of devices.
    """
    return collectives_in_text(_text(compiled), mesh.shape)


def collectives_in_text(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Like `collectives`, from a program's text and the sizes of the mesh axes in mesh order."""
    modules = hlo.parse_modules(text)
    return [found for module in modules for found in collectives_of(module, mesh_shape)]


def collectives_of(module: hlo.Module, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Like `collectives`, from a parsed program."""
    num_devices = math.prod(mesh_shape.values())
    if module.num_partitions not in (1, num_devices):
        raise ValueError(
            f"the program spans {module.num_partitions} devices but the mesh {dict(mesh_shape)}"
            f" has {num_devices}; pass the mesh that the program was compiled for"
        )
    overlapped = asynchrony.overlapped(module)
    wrapper = {
        inner.name: start.name
        for body in module.computations.values()
        for start in body
        if (inner := asynchrony.wrapped_collective(module, start)) is not None
    }
    found = []
    for instruction, loops in module.under_loops(
        lambda i: asynchrony.collective_kind(i) is not None
    ):
        groups = device_groups.parse(instruction.attributes, num_devices)
        start = wrapper.get(instruction.name, instruction.name)
        is_async = start != instruction.name or asynchrony.is_start(instruction)
        found.append(
            Collective(
                kind=asynchrony.collective_kind(instruction) or "",
                axes=device_groups.axes_of(groups, mesh_shape),
                loop_depth=len(loops),
                trip_count=_executions(loops),
                bytes=sum(a.bytes for a in hlo.arrays_of(asynchrony.result_of(instruction))),
                name=instruction.name,
                op_name=instruction.op_name,
                is_async=is_async and not asynchrony.is_marked_synchronous(instruction),
                is_overlapped=start in overlapped,
                loop=_innermost(loops),
            )
        )
    return found


def host_copies(compiled: jax.stages.Compiled) -> list[HostCopy]:
    """Return the copies between device and host in a compiled step, in program order."""
    return host_copies_in_text(_text(compiled))


def host_copies_in_text(text: str) -> list[HostCopy]:
    """Like `host_copies`, from a program's text."""
    found = []
    for module in hlo.parse_modules(text):
        overlapped = asynchrony.overlapped(module)
        # A fusion counts as one copy, so the computation that it calls is not searched.
        for instruction, loops in module.under_loops(
            lambda i: asynchrony.host_copy(i) is not None or i.opcode == "fusion"
        ):
            moved = asynchrony.host_copy(instruction)
            if moved is None:
                continue
            found.append(
                HostCopy(
                    direction=moved.direction,
                    trip_count=_executions(loops),
                    bytes=moved.bytes,
                    name=instruction.name,
                    is_async=asynchrony.is_start(instruction),
                    is_overlapped=instruction.name in overlapped,
                    loop=_innermost(loops),
                )
            )
    return found


def _executions(loops: Sequence[hlo.Instruction]) -> int | None:
    """Return how often the body of nested loops runs in all, or None if a count is unknown."""
    counts = [hlo.trip_count(loop) for loop in loops]
    known = [count for count in counts if count is not None]
    return math.prod(known) if len(known) == len(counts) else None


def _innermost(loops: Sequence[hlo.Instruction]) -> str:
    return (hlo.loop_label(loops[-1]) or f"loop {len(loops)}") if loops else ""


def tasks_of_loop(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, axis: str = "pipeline"
) -> list[Task]:
    """Return the permutations over a mesh axis in a loop, and the matrix products around them.

    Two tasks can run at the same time if neither needs the other. A task is one instruction of the
    loop's body; it may be a conditional or an inner loop, including everything inside.

    Args:
        compiled: a compiled step in which exactly one loop permutes over the axis.
        mesh: the mesh that it was compiled for.
        axis: the name of the mesh axis.

    Returns:
        The tasks of one iteration, in program order.

    Raises:
        ValueError: if no loop or more than one loop permutes over the axis.
    """
    return tasks_of_loop_in_text(_text(compiled), mesh.shape, axis)


def tasks_of_loop_in_text(
    text: str, mesh_shape: Mapping[str, int], axis: str = "pipeline"
) -> list[Task]:
    """Like `tasks_of_loop`, from a program's text and the sizes of the mesh axes in mesh order."""
    num_devices = math.prod(mesh_shape.values())

    def pairs(instruction: hlo.Instruction) -> tuple[tuple[int, ...], ...]:
        if asynchrony.collective_kind(instruction) != "collective-permute":
            return ()
        groups = device_groups.parse(instruction.attributes, num_devices)
        return tuple(groups) if axis in device_groups.axes_of(groups, mesh_shape) else ()

    bodies = [
        (module, body)
        for module in hlo.parse_modules(text)
        for body in module.loop_bodies()
        if any(map(pairs, body))
    ]
    if len(bodies) != 1:
        raise ValueError(
            f"{len(bodies)} loops of the program permute over mesh axis {axis!r}, but it must be"
            " one; pass the compiled step of a pipeline"
        )
    module, body = bodies[0]
    tasks = []
    needs = hlo.dependencies(body)
    for instruction in body:
        moved = pairs(instruction)
        if moved or module.reaches(instruction, lambda i: hlo.matmul_flops(i) is not None):
            tasks.append(Task(name=instruction.name, pairs=moved, needs=needs[instruction.name]))
    names = {task.name for task in tasks}
    return [dataclasses.replace(task, needs=task.needs & names) for task in tasks]


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


def flops(compiled: jax.stages.Compiled) -> float | None:
    """Return the FLOPs of one device as the compiler counts them, or None if it does not.

    The compiler counts the body of a loop once, no matter how often it runs, so the result is too
    small for any program that scans over layers or microbatches. `matmul_flops` counts iterations.
    """
    analysis = compiled.cost_analysis()
    # Some backends return a list with one dict per program.
    parts = analysis if isinstance(analysis, list | tuple) else [analysis]
    counts = [part["flops"] for part in parts if part and "flops" in part]
    return float(sum(counts)) if counts else None


def matmul_flops(compiled: jax.stages.Compiled) -> float | None:
    """Return the FLOPs of all matrix products and convolutions of one device in one step.

    Unlike `flops`, this counts every iteration of a loop. Every branch of a conditional counts as
    if it were always taken, so for a pipeline this is the work of stages that are never idle.
    `hlo.matmul_flops` defines which instructions count as products.

    Returns:
        The sum, or None if the trip count of a loop around a product is unknown.
    """
    return matmul_flops_in_text(_text(compiled))


def matmul_flops_in_text(text: str) -> float | None:
    """Like `matmul_flops`, from a program's text."""
    total = 0.0
    for module in hlo.parse_modules(text):
        for product, trip_counts in module.in_loops(lambda i: hlo.matmul_flops(i) is not None):
            known = [count for count in trip_counts if count is not None]
            if len(known) < len(trip_counts):
                return None
            total += (hlo.matmul_flops(product) or 0) * math.prod(known)
    return total


def summary(found: Sequence[Collective]) -> list[SummaryRow]:
    """Group collectives by kind, axes and loop depth, with the most bytes per step first."""
    groups: dict[tuple[str, tuple[str, ...], int], list[Collective]] = {}
    for collective in found:
        key = (collective.kind, collective.axes, collective.loop_depth)
        groups.setdefault(key, []).append(collective)
    rows = []
    for (kind, axes, loop_depth), members in groups.items():
        per_step = [c.bytes * c.trip_count for c in members if c.trip_count is not None]
        rows.append(
            SummaryRow(
                kind=kind,
                axes=axes,
                loop_depth=loop_depth,
                count=len(members),
                bytes=sum(c.bytes for c in members),
                bytes_per_step=sum(per_step) if len(per_step) == len(members) else None,
            )
        )
    return sorted(rows, key=lambda row: (-(row.bytes_per_step or row.bytes), row.kind, row.axes))


def format_table(rows: Sequence[SummaryRow]) -> str:
    """Format the rows as an aligned table with a header line; bytes are per device."""
    if not rows:
        return "no collectives"
    cells = [("collective", "axes", "loops", "count", "bytes", "bytes/step")]
    for row in rows:
        per_step = "unknown" if row.bytes_per_step is None else f"{row.bytes_per_step:,}"
        axes = ",".join(row.axes) or "-"
        cells.append(
            (row.kind, axes, str(row.loop_depth), str(row.count), f"{row.bytes:,}", per_step)
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right))
    return "\n".join(lines)


def widest_arrays(
    compiled: jax.stages.Compiled, dtype: DTypeLike | None = None, count: int = 5
) -> list[tuple[hlo.Array, str]]:
    """Return the largest arrays of a step, each with the name of the operation that produces it.

    Args:
        compiled: the compiled step.
        dtype: only consider arrays of this element type; None considers all.
        count: maximum number of arrays to return.

    Returns:
        (array, name) pairs, the largest first, with per-device shapes. Arguments are included;
        values that exist only inside a fused kernel are not.
    """
    wanted = None if dtype is None else hlo.dtype_name(dtype)
    found = {
        (array, instruction.op_name or instruction.name)
        for module in hlo.parse_modules(_text(compiled))
        for instruction in module.materialised()
        for array in hlo.arrays_of(instruction.type)
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


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "the backend provides no text for this compiled program (compiled.as_text() is None);"
            " audit the step on a CPU mesh of the same shape"
        )
    return text
