"""Schedules to draw examples from, and ways to edit a table."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st

from sharding.pipeline.schedule import SCHEDULES
from sharding.pipeline.schedules.table import Op, Schedule

STAGES, MICROBATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 32), st.integers(1, 4)
#: Chunks that a schedule can have; the others have any number.
FIXED_CHUNKS = {"1f1b": 1, "zero_bubble": 1, "zbv": 2}
# Nothing is timed, and the same examples are tried on every machine.
properties = settings(deadline=None, derandomize=True, max_examples=60)


@st.composite
def schedules(draw, names=tuple(SCHEDULES), stages=STAGES, microbatches=MICROBATCHES):
    """A schedule of one of these names."""
    name = draw(st.sampled_from(sorted(names)))
    chunks = FIXED_CHUNKS.get(name) or draw(CHUNKS)
    return SCHEDULES[name](draw(stages), draw(microbatches), chunks)


@st.composite
def places(draw, source=None):
    """A schedule and one of its operations: (schedule, tick, stage, op)."""
    small = schedules(stages=st.integers(1, 5), microbatches=st.integers(1, 8))
    schedule = draw(source or small)
    ops = [(tick, stage, op) for tick, stage, cell in schedule.cells() for op in cell]
    return schedule, *draw(st.sampled_from(ops))


def with_cell(schedule: Schedule, tick: int, stage: int, cell: tuple[Op, ...]) -> Schedule:
    """Returns the schedule with another cell in that place."""
    rows = [list(row) for row in schedule.ticks]
    rows[tick][stage] = cell
    return dataclasses.replace(schedule, ticks=tuple(tuple(row) for row in rows))


def without(schedule: Schedule, tick: int, stage: int, op: Op) -> Schedule:
    """Returns the schedule without the operation that runs there."""
    rest = tuple(other for other in schedule.ticks[tick][stage] if other != op)
    return with_cell(schedule, tick, stage, rest)


def with_tick(schedule: Schedule, before: int, stage: int, op: Op) -> Schedule:
    """Returns the schedule with a new tick in which this operation runs alone."""
    row = tuple((op,) if s == stage else () for s in range(schedule.num_stages))
    return dataclasses.replace(
        schedule, ticks=(*schedule.ticks[:before], row, *schedule.ticks[before:])
    )
