"""A pipeline schedule as a table of operations, and the rules that a table must satisfy.

The layers are cut into contiguous runs, the *virtual stages* v = 0, 1, ... in layer order. A stage
holds one or more of them, its *chunks*. A table has one row per tick and one cell per stage. A cell
contains at most one forward (F), then at most one backward (B) or input gradient (I), then at most
one weight gradient (W). The output of an operation is available to other virtual stages from the
next tick on, and to its own virtual stage in the same cell.

1F1B with 2 stages and 3 microbatches, drawn with one line per stage:

    tick    0  1    2    3    4
    stage 0 F0 F1   F2B0 B1   B2
    stage 1 .  F0B0 F1B1 F2B2 .

F0 on stage 1 needs F0 on stage 0, so it runs one tick later. B0 on stage 1 needs only F0 on the
same virtual stage, because stage 1 is the last one, so both share a cell. B0 on stage 0 needs B0 on
stage 1, so it waits for the next tick. With two chunks per stage and the placement (0, 1, 1, 0),
stage 0 holds virtual stages 0 and 3 as its chunks 0 and 1, and stage 1 holds virtual stages 1 and
2.

Tables are pure Python: generators.py makes tables, csv_table.py reads and writes them,
simulate.py times them.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
from typing import NamedTuple

from fields.numbers import shown

#: Kinds of operations, in PyTorch's letters. A whole backward (B) computes the input gradient (I)
#: and the weight gradient (W) together.
FORWARD = "F"
BACKWARD = "B"
INPUT_GRADIENT = "I"
WEIGHT_GRADIENT = "W"

#: Order of the operations within a cell.
_RANK = {FORWARD: 0, BACKWARD: 1, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: 2}

#: Largest (microbatches + stages) × stages × chunks, about the number of cells of a table. A larger
#: table would take minutes to make; 16 stages with 8 chunks and 512 microbatches need 67,584.
MAX_SIZE = 2**18

#: Identifies an operation of a table: (kind, microbatch, virtual stage).
Key = tuple[str, int, int]


class Op(NamedTuple):
    """One operation of a stage: a kind (F, B, I or W) on one microbatch and one of its chunks."""

    kind: str
    microbatch: int
    chunk: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A table of operations: `ticks[t][s]` is the cell of stage s in tick t.

    Attributes:
        name: name used in messages.
        num_stages: number of stages, S.
        num_chunks: number of chunks of layers per stage, V.
        num_microbatches: number of microbatches, M.
        placement: stage of each of the V*S virtual stages.
        ticks: ticks × stages × operations.
    """

    name: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    placement: tuple[int, ...]
    ticks: tuple[tuple[tuple[Op, ...], ...], ...]

    def cells(self) -> Iterator[tuple[int, int, tuple[Op, ...]]]:
        """Yield (tick, stage, cell), tick by tick."""
        for tick, row in enumerate(self.ticks):
            for stage, cell in enumerate(row):
                yield tick, stage, cell

    def when(self) -> dict[Key, int]:
        """Return (kind, microbatch, virtual stage) -> tick."""
        chunks = self.chunks()
        return {
            (op.kind, op.microbatch, chunks[stage][op.chunk]): tick
            for tick, stage, cell in self.cells()
            for op in cell
        }

    def chunks(self) -> list[list[int]]:
        """Return the virtual stages of each stage, in layer order."""
        chunks: list[list[int]] = [[] for _ in range(self.num_stages)]
        for virtual, stage in enumerate(self.placement):
            chunks[stage].append(virtual)
        return chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage of a stage's chunk."""
        return self.chunks()[stage][chunk]

    def chunk_of(self, virtual_stage: int) -> int:
        """Return the index of a virtual stage among the chunks of its stage."""
        return self.placement[:virtual_stage].count(self.placement[virtual_stage])

    def has_backward(self) -> bool:
        """Return whether the table contains backwards (B) or input gradients (I)."""
        return any(
            op.kind in (BACKWARD, INPUT_GRADIENT) for _, _, cell in self.cells() for op in cell
        )

    def splits_backward(self) -> bool:
        """Return whether any backward is split into I and W."""
        split = (INPUT_GRADIENT, WEIGHT_GRADIENT)
        return any(op.kind in split for _, _, cell in self.cells() for op in cell)


def loop_placement(num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the placement 0..S-1 repeated per chunk; the last stage sends to the first."""
    return tuple(range(num_stages)) * num_chunks


def v_placement(num_stages: int) -> tuple[int, ...]:
    """Return the placement 0..S-1, S-1..0 of two chunks; stage 0 has the first and last layers."""
    return (*range(num_stages), *reversed(range(num_stages)))


def chunk_indices(placement: Sequence[int]) -> list[int]:
    """Return the index of each virtual stage among the chunks of its stage."""
    num_chunks: Counter[int] = Counter()
    indices = []
    for stage in placement:
        indices.append(num_chunks[stage])
        num_chunks[stage] += 1
    return indices


def check_size(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """Check that a table is small enough to be made, before it is.

    Args:
        name: name of the schedule, for the message.
        num_stages: number of stages, S.
        num_microbatches: number of microbatches, M.
        num_chunks: number of chunks of layers per stage, V.

    Raises:
        ValueError: the table would have more than MAX_SIZE cells.
    """
    if (num_microbatches + num_stages) * num_stages * num_chunks > MAX_SIZE:
        raise ValueError(
            f"{name}: a table of {shown(num_stages)} stages, {shown(num_chunks)} chunks per stage "
            f"and {shown(num_microbatches)} microbatches is too large: (microbatches + stages) × "
            f"stages × chunks must be at most {MAX_SIZE}; choose fewer microbatches "
            "(train.num_microbatches), stages (mesh.pipeline) or chunks (pipeline.chunks)"
        )


def needs(key: Key, ran: Container[Key], num_virtual_stages: int) -> list[Key]:
    """Return the operations whose results `key` reads.

    Args:
        key: operation.
        ran: all operations of the table; shows whether the next virtual stage runs I or B.
        num_virtual_stages: number of virtual stages, V*S.
    """
    kind, microbatch, virtual = key
    if kind == FORWARD:
        return [(FORWARD, microbatch, virtual - 1)] if virtual else []
    if kind == WEIGHT_GRADIENT:
        return [(INPUT_GRADIENT, microbatch, virtual)]
    forward: Key = (FORWARD, microbatch, virtual)
    if virtual == num_virtual_stages - 1:
        return [forward]
    split: Key = (INPUT_GRADIENT, microbatch, virtual + 1)
    return [forward, split if split in ran else (BACKWARD, microbatch, virtual + 1)]


def verify(schedule: Schedule) -> None:
    """Check that every operation runs exactly once, after everything that it depends on.

    Raises:
        ValueError: names the operation, its stage and ticks, and the broken dependency.
    """
    _check_placement(schedule)
    ran = _check_cells(schedule)
    virtual_stages = range(len(schedule.placement))
    has_backward = any(kind != FORWARD for kind, _, _ in ran)
    for microbatch in range(schedule.num_microbatches):
        for virtual in virtual_stages:
            _check_complete(schedule, ran, microbatch, virtual, has_backward=has_backward)
    for key, tick in ran.items():
        for need in needs(key, ran, len(virtual_stages)):
            is_same_virtual_stage = need[2] == key[2]
            # Within a virtual stage the same tick is early enough: `_check_cells` ensures the
            # order F, B or I, W within a cell. Across virtual stages it must be an earlier tick.
            if not (need in ran and ran[need] < tick + is_same_virtual_stage):
                timing = f"runs in tick {ran[need]}" if need in ran else "never runs"
                raise ValueError(
                    f"{schedule.name}: {_label(schedule, key)} in tick {tick} needs "
                    f"{_label(schedule, need)}, which {timing}; it must run "
                    + ("before it" if is_same_virtual_stage else "in an earlier tick")
                )


def max_in_flight(
    schedule: Schedule,
    *,
    since: str = FORWARD,
    until: Collection[str] = (BACKWARD, WEIGHT_GRADIENT),
) -> list[int]:
    """Return, for each stage, the largest number of chunk activations held at once.

    The unit is a chunk; a stage has num_chunks of them.

    Args:
        since: kind of operation from which on an activation is held.
        until: kinds of operations on the same microbatch and chunk that end this.
    """
    peaks = [0] * schedule.num_stages
    now = [0] * schedule.num_stages
    change = {since: 1} | dict.fromkeys(until, -1)
    for _, stage, cell in schedule.cells():
        for op in cell:
            now[stage] += change.get(op.kind, 0)
            peaks[stage] = max(peaks[stage], now[stage])
    return peaks


def _check_placement(schedule: Schedule) -> None:
    name = schedule.name
    stages = schedule.num_stages
    chunks = schedule.num_chunks
    if min(stages, chunks, schedule.num_microbatches) < 1:
        raise ValueError(
            f"{name}: num_stages={stages}, num_chunks={chunks} and "
            f"num_microbatches={schedule.num_microbatches} must be at least 1"
        )
    if len(schedule.placement) != stages * chunks:
        raise ValueError(
            f"{name}: the placement has {len(schedule.placement)} virtual stages, not "
            f"{stages} stages × {chunks} chunks"
        )
    for virtual, stage in enumerate(schedule.placement):
        if stage not in range(stages):
            raise ValueError(
                f"{name}: virtual stage {virtual} is placed on stage {stage}; there are {stages}"
            )
    for stage in range(stages):
        if schedule.placement.count(stage) != chunks:
            raise ValueError(
                f"{name}: stage {stage} holds {schedule.placement.count(stage)} virtual stages; "
                f"every stage must hold {chunks}"
            )


def _check_cells(schedule: Schedule) -> dict[Key, int]:
    """Check that the cells are well formed and no operation runs twice.

    Returns:
        (kind, microbatch, virtual stage) -> tick.
    """
    chunks = schedule.chunks()
    ran: dict[Key, int] = {}
    for tick, row in enumerate(schedule.ticks):
        if len(row) != schedule.num_stages:
            raise ValueError(
                f"{schedule.name}: tick {tick} has {len(row)} stages, not {schedule.num_stages}"
            )
    for tick, stage, cell in schedule.cells():
        place = f"{schedule.name}: tick {tick}, stage {stage}"
        for op in cell:
            if (
                op.kind not in _RANK
                or op.microbatch not in range(schedule.num_microbatches)
                or op.chunk not in range(schedule.num_chunks)
            ):
                raise ValueError(
                    f"{place}: {op.kind}{op.microbatch} of chunk {op.chunk} is not an operation of "
                    f"{schedule.num_microbatches} microbatches and {schedule.num_chunks} chunks"
                )
            key = (op.kind, op.microbatch, chunks[stage][op.chunk])
            if key in ran:
                raise ValueError(
                    f"{schedule.name}: {_label(schedule, key)} runs twice: in ticks {ran[key]} "
                    f"and {tick}"
                )
            ran[key] = tick
        ranks = [_RANK[op.kind] for op in cell]
        if any(later <= earlier for earlier, later in zip(ranks, ranks[1:], strict=False)):
            raise ValueError(
                f"{place}: the cell {' '.join(op.kind + str(op.microbatch) for op in cell)} must "
                "hold at most one F, then one B or I, then one W"
            )
    return ran


def _check_complete(
    schedule: Schedule, ran: dict[Key, int], microbatch: int, virtual: int, *, has_backward: bool
) -> None:
    """Check that a microbatch's forward and backward each run once on a virtual stage."""
    forward, backward, input_gradient, weight_gradient = (
        (kind, microbatch, virtual) for kind in _RANK
    )
    missing = [forward] if forward not in ran else []
    parts: list[Key] = []
    if has_backward:
        parts = [part for part in (input_gradient, weight_gradient) if part in ran]
        if backward in ran and parts:
            raise ValueError(
                f"{schedule.name}: {_label(schedule, backward)} in tick {ran[backward]} is a whole "
                f"backward, but its part {_label(schedule, parts[0])} runs in tick {ran[parts[0]]};"
                " keep either the B, or the I and the W"
            )
        if backward not in ran:
            in_parts = parts or BACKWARD not in {kind for kind, _, _ in ran}
            wanted = [input_gradient, weight_gradient] if in_parts else [backward]
            missing += [key for key in wanted if key not in ran]
    if missing:
        message = f"{schedule.name}: {_label(schedule, missing[0])} never runs"
        if parts and missing[0] != forward:
            half = f"{_label(schedule, parts[0])}, runs in tick {ran[parts[0]]}"
            message += f", but the other half of its backward, {half}"
        raise ValueError(message)


def _label(schedule: Schedule, key: Key) -> str:
    kind, microbatch, virtual = key
    chunk = f" of chunk {schedule.chunk_of(virtual)}" if schedule.num_chunks > 1 else ""
    return f"{kind}{microbatch}{chunk} on stage {schedule.placement[virtual]}"
