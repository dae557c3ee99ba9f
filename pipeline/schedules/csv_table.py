"""Reads and writes schedule tables as CSV files: one row per stage, one column per tick.

An operation is written in the notation of PyTorch's pipelining: virtual stage, letter (F, B, I or
W), microbatch, e.g. `5F3`. A cell is empty or contains operations separated by `;`, e.g. `1F4;1B0`.
The placement of virtual stages on stages follows from the rows. For example, 1F1B with 2 stages and
2 microbatches:

    0F0,0F1,0B0,0B1
    ,1F0;1B0,1F1;1B1,

The compute-only tables of torch.distributed.pipelining, which have one operation per cell, can be
read without changes.
"""

import csv
import math
import re
from pathlib import Path

from pipeline.schedules.table import MAX_SIZE, Op, Schedule, check_size, chunk_indices
from untrusted.files import read_text
from untrusted.messages import shortened

_OP = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
#: Largest rows × columns. A schedule takes at most about 4 ticks per microbatch and chunk.
_MAX_CELLS = 4 * MAX_SIZE
#: Largest number of rows, which are stages: (microbatches + stages) × stages is limited.
_MAX_ROWS = math.isqrt(MAX_SIZE)


def read_csv(path: str | Path) -> Schedule:
    """Read a table from a file, without verifying it.

    Raises:
        ValueError: the file cannot be read or a cell cannot be parsed. The message names the file,
            row and column.
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
            "have the same number of them, and they must be numbered from 0 without gaps"
        )
    placement = tuple(stage_of[virtual] for virtual in sorted(stage_of))
    num_chunks = len(placement) // len(rows)
    num_microbatches = 1 + max(m for row in rows for cell in row for _, m, _ in cell)
    check_size(str(path), len(rows), num_microbatches, num_chunks)
    chunk_of = chunk_indices(placement)
    num_ticks = max(map(len, rows))
    return Schedule(
        name=str(path),
        num_stages=len(rows),
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
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
    """Write a table such that `read_csv` restores its stages, chunks, microbatches and ticks."""
    chunks = schedule.chunks()
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for stage in range(schedule.num_stages):
            writer.writerow(
                ";".join(f"{chunks[stage][op.chunk]}{op.kind}{op.microbatch}" for op in row[stage])
                for row in schedule.ticks
            )


def _read_rows(path: Path) -> list[list[list[tuple[str, int, int]]]]:
    """Return rows × columns × (kind, microbatch, virtual stage)."""
    try:
        text = read_text(path).removeprefix("\ufeff")
    except OSError as error:
        raise ValueError(f"the schedule table {path} cannot be read: {error.strerror}") from None
    # Counted before the text is parsed: a cell takes a byte in the file, but a list in memory.
    texts = text.splitlines()
    num_columns = 1 + max((line.count(",") for line in texts), default=0)
    num_rows = len(texts)
    num_ops = text.count(";") + num_rows * num_columns
    if num_rows > _MAX_ROWS or num_ops > _MAX_CELLS:
        raise ValueError(
            f"the schedule table {path} is too large: it has {num_rows} rows and {num_columns} "
            f"columns, but at most {_MAX_ROWS} rows and {_MAX_CELLS} cells or operations are "
            "allowed; choose fewer microbatches or stages"
        )
    try:
        lines = list(csv.reader(texts))
    except csv.Error as error:
        raise ValueError(f"the schedule table {path} is not a CSV file: {error}") from None
    return [
        [_parse_cell(cell, path, row, column) for column, cell in enumerate(line, 1)]
        for row, line in enumerate(lines, 1)
        if line
    ]


def _parse_cell(cell: str, path: Path, row: int, column: int) -> list[tuple[str, int, int]]:
    ops = []
    for text in filter(None, (part.strip() for part in cell.split(";"))):
        match = _OP.fullmatch(text)
        if not match:
            raise ValueError(
                f"{path}, row {row}, column {column}: {shortened(text)!r} is not an operation; "
                "write virtual stage, F, B, I or W, and microbatch, such as 5F3, and separate the "
                "operations of a cell by ';'"
            )
        virtual, kind, microbatch = match.groups()
        ops.append((kind, int(microbatch), int(virtual)))
    return ops
