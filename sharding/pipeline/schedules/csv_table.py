"""Tables as CSV files: a row per stage, a column per tick, operations such as 5F3.

An operation is written as PyTorch's pipelining does: virtual stage, letter (F, B, I or W),
microbatch. A cell is empty or has operations joined by `;`, such as `1F4;1B0`. Which stage holds
which virtual stages is read off the rows. The compute-only tables of torch.distributed.pipelining,
which have one operation in a cell, read as they are.
"""

import csv
import re
from pathlib import Path

from sharding.pipeline.schedules.table import Op, Schedule

_OP = re.compile(r"(\d+)([FBIW])(\d+)")


def read_csv(path: str | Path) -> Schedule:
    """Returns the table in a file, not yet verified.

    Raises:
      ValueError: the file cannot be read, or a cell is not understood; names file, row and column.
    """
    rows = _read_rows(Path(path))
    stage_of: dict[int, int] = {}
    for stage, row in enumerate(rows):
        for virtual in sorted({virtual for cell in row for _, _, virtual in cell}):
            if stage_of.setdefault(virtual, stage) != stage:
                raise ValueError(
                    f"{path}: virtual stage {virtual} runs in row {stage_of[virtual] + 1} and in "
                    f"row {stage + 1}; a virtual stage belongs to one stage"
                )
    if not stage_of:
        raise ValueError(f"{path} has no operations; write cells such as 0F0")
    absent = next((v for v in range(max(stage_of)) if v not in stage_of), None)
    if absent is not None or len(stage_of) % len(rows):
        gap = "" if absent is None else f"; virtual stage {absent} is in no row"
        raise ValueError(
            f"{path} has {len(stage_of)} virtual stages in {len(rows)} rows{gap}; every row must "
            "have the same number of them, and they must count from 0"
        )
    placement = tuple(stage_of[virtual] for virtual in sorted(stage_of))
    chunk_of = [placement[:virtual].count(stage) for virtual, stage in enumerate(placement)]
    num_ticks = max(map(len, rows))
    return Schedule(
        name=str(path),
        num_stages=len(rows),
        num_chunks=len(placement) // len(rows),
        num_microbatches=1 + max(m for row in rows for cell in row for _, m, _ in cell),
        placement=placement,
        ticks=tuple(
            tuple(
                tuple(Op(kind, m, chunk_of[virtual]) for kind, m, virtual in cell)
                for cell in (row[tick] if tick < len(row) else () for row in rows)
            )
            for tick in range(num_ticks)
        ),
    )


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Writes a table so that `read_csv` returns its stages, chunks, microbatches and ticks."""
    held = schedule.chunks()
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for stage in range(schedule.num_stages):
            writer.writerow(
                ";".join(f"{held[stage][op.chunk]}{op.kind}{op.microbatch}" for op in row[stage])
                for row in schedule.ticks
            )


def _read_rows(path: Path) -> list[list[list[tuple[str, int, int]]]]:
    """Returns rows × columns × (kind, microbatch, virtual stage)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(f"the schedule table {path} cannot be read: {reason}") from None
    lines = csv.reader(text.splitlines())
    return [
        [
            _parse_cell(cell, f"{path}, row {row}, column {column}")
            for column, cell in enumerate(line, 1)
        ]
        for row, line in enumerate(lines, 1)
        if line
    ]


def _parse_cell(cell: str, place: str) -> list[tuple[str, int, int]]:
    ops = []
    for text in filter(None, (part.strip() for part in cell.split(";"))):
        match = _OP.fullmatch(text)
        if not match:
            raise ValueError(
                f"{place}: {text!r} is no operation; write virtual stage, F, B, I or W, and "
                "microbatch, such as 5F3, and join those of a cell by ';'"
            )
        virtual, kind, microbatch = match.groups()
        ops.append((kind, int(microbatch), int(virtual)))
    return ops
