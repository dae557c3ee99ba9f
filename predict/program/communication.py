"""Lists the collectives of a compiled step.

XLA decides where to communicate, so this is not visible in the source of a step. Promises such as
"no gradient all-reduce inside the microbatch loop" are therefore checked on the compiled program:

    compiled = jax.jit(train_step).lower(state, batch).compile()
    print(format_table(summary(collectives(compiled, mesh))))

The last two functions are in collective_table.py.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from predict.program import asynchrony, device_groups
from predict.program.instruction import Instruction, arrays_of, executions, loop_label
from predict.program.module import Module
from predict.program.parse import parse_modules, text_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a compiled step.

    Attributes:
        kind: one of `asynchrony.COLLECTIVES`. An asynchronous start-done pair counts once, under
            the kind of its synchronous form. A permutation that XLA split into a send and a receive
            is a 'collective-permute'.
        axes: mesh axes, in mesh order, along which the devices of one group differ; empty if
            every group is a single device.
        loop_depth: number of while loops around it; a `jax.lax.scan` compiles to one.
        trip_count: executions per step, the product of the trip counts of the loops around it. 1
            outside loops, None if one of these trip counts is unknown. A collective in a branch of
            a conditional counts as if that branch were always taken.
        bytes: bytes of its output on one device in one execution.
        name: its name in the compiled program.
        op_name: traced operation that it comes from, '' if unknown.
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


def collectives(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[Collective]:
    """Return the collectives of a compiled step, in program order.

    Args:
        compiled: result of `jax.jit(f).lower(...).compile()`.
        mesh: mesh that it was compiled for.

    Returns:
        One entry per instruction.

    Raises:
        ValueError: if the program and the mesh differ in their number of devices.
    """
    return collectives_in_text(text_of(compiled), mesh.shape)


def collectives_in_text(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Like `collectives`, from a program's text and the sizes of the mesh axes in mesh order."""
    modules = parse_modules(text)
    return [collective for module in modules for collective in collectives_of(module, mesh_shape)]


def collectives_of(module: Module, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Like `collectives`, from a parsed program."""
    num_devices = math.prod(mesh_shape.values())
    if module.num_partitions not in (1, num_devices):
        raise ValueError(
            f"the program spans {module.num_partitions} devices but the mesh {dict(mesh_shape)}"
            f" has {num_devices}; pass the mesh that the program was compiled for"
        )
    overlapped = asynchrony.overlapped_starts(module)
    wrapper = {
        inner.name: start.name
        for body in module.computations.values()
        for start in body
        if (inner := asynchrony.wrapped_collective(module, start)) is not None
    }
    module_collectives = []
    for instruction, loops in module.under_loops(
        lambda i: asynchrony.collective_kind(i) is not None
    ):
        groups = device_groups.parse(instruction.attributes, num_devices)
        start = wrapper.get(instruction.name, instruction.name)
        is_async = start != instruction.name or asynchrony.is_start(instruction)
        module_collectives.append(
            Collective(
                kind=asynchrony.collective_kind(instruction) or "",
                axes=device_groups.axes_of(groups, mesh_shape),
                loop_depth=len(loops),
                trip_count=executions(loops),
                bytes=sum(a.bytes for a in arrays_of(asynchrony.result_of(instruction))),
                name=instruction.name,
                op_name=instruction.op_name,
                is_async=is_async and not asynchrony.is_marked_synchronous(instruction),
                is_overlapped=start in overlapped,
                loop=innermost_label(loops),
            )
        )
    return module_collectives


def innermost_label(loops: Sequence[Instruction]) -> str:
    """Return the label of the innermost of some loops, as in `Collective`."""
    return (loop_label(loops[-1]) or f"loop {len(loops)}") if loops else ""
