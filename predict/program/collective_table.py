"""Groups the collectives of a compiled step, and formats them as a table."""

import dataclasses
from collections.abc import Collection, Sequence

from predict.program.communication import Collective


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
    return "\n".join(align(cells, left=(0, 1)))


def align(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return the lines of a table whose columns are aligned, to the right except for some.

    Args:
        rows: cells of each line, also of the heads.
        left: numbers of the columns to align to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
