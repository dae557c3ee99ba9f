"""Hypothesis strategies for schedules, and functions that edit a table."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st

from pipeline.schedule import SCHEDULES
from pipeline.schedules.table import Op, Schedule

STAGES = st.integers(1, 8)
MICROBATCHES = st.integers(1, 32)
CHUNKS = st.integers(1, 4)
#: Number of chunks of schedules that support only one number.
FIXED_CHUNKS = {"1f1b": 1, "zero_bubble": 1, "zbv": 2}
# No deadline, and the same examples on every machine.
properties = settings(deadline=None, derandomize=True, max_examples=60)


@st.composite
def schedules(draw, names=tuple(SCHEDULES), stages=STAGES, microbatches=MICROBATCHES):
    """Draw a schedule with one of these names."""
    name = draw(st.sampled_from(sorted(names)))
    chunks = FIXED_CHUNKS.get(name) or draw(CHUNKS)
    return SCHEDULES[name](draw(stages), draw(microbatches), chunks)


@st.composite
def places(draw, source=None):
    """Draw a schedule and one of its operations: (schedule, tick, stage, op)."""
    small = schedules(stages=st.integers(1, 5), microbatches=st.integers(1, 8))
    schedule = draw(source or small)
    ops = [(tick, stage, op) for tick, stage, cell in schedule.cells() for op in cell]
    return schedule, *draw(st.sampled_from(ops))


def with_cell(schedule: Schedule, tick: int, stage: int, cell: tuple[Op, ...]) -> Schedule:
    """Return the schedule with the cell of a tick and a stage replaced."""
    rows = [list(row) for row in schedule.ticks]
    rows[tick][stage] = cell
    return dataclasses.replace(schedule, ticks=tuple(tuple(row) for row in rows))


def without(schedule: Schedule, tick: int, stage: int, op: Op) -> Schedule:
    """Return the schedule without one operation."""
    rest = tuple(other for other in schedule.ticks[tick][stage] if other != op)
    return with_cell(schedule, tick, stage, rest)


def with_tick(schedule: Schedule, before: int, stage: int, op: Op) -> Schedule:
    """Return the schedule with an additional tick, in which only this operation runs."""
    row = tuple((op,) if s == stage else () for s in range(schedule.num_stages))
    return dataclasses.replace(
        schedule, ticks=(*schedule.ticks[:before], row, *schedule.ticks[before:])
    )
