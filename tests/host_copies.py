"""Lists the copies between device and host in a compiled step, for tests of where state is kept."""

import dataclasses

import jax

from predict.program import asynchrony
from predict.program.communication import innermost_label
from predict.program.instruction import executions
from predict.program.parse import parse_modules, text_of


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


def host_copies(compiled: jax.stages.Compiled) -> list[HostCopy]:
    """Return the copies between device and host in a compiled step, in program order."""
    return host_copies_in_text(text_of(compiled))


def host_copies_in_text(text: str) -> list[HostCopy]:
    """Like `host_copies`, from a program's text."""
    copies = []
    for module in parse_modules(text):
        overlapped = asynchrony.overlapped_starts(module)
        # A fusion counts as one copy, so the computation that it calls is not searched.
        for instruction, loops in module.under_loops(
            lambda i: asynchrony.host_copy(i) is not None or i.opcode == "fusion"
        ):
            moved = asynchrony.host_copy(instruction)
            if moved is None:
                continue
            copies.append(
                HostCopy(
                    direction=moved.direction,
                    trip_count=executions(loops),
                    bytes=moved.bytes,
                    name=instruction.name,
                    is_async=asynchrony.is_start(instruction),
                    is_overlapped=instruction.name in overlapped,
                    loop=innermost_label(loops),
                )
            )
    return copies
