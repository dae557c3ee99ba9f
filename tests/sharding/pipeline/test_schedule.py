"""Every schedule of every size: correct, as fast and as lean as the papers say; broken ones not."""

import dataclasses
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sharding.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Op,
    PipelineConfig,
    Schedule,
    bubble_fraction,
    draw,
    forward_only,
    main,
    max_in_flight,
    synchronous_time,
    verify,
)

STAGES, MICROBATCHES = st.integers(1, 8), st.integers(1, 32)
NAMES = st.sampled_from(sorted(SCHEDULES))
# Nothing is timed, and the same examples are tried on every machine.
properties = settings(deadline=None, derandomize=True, max_examples=60)


@st.composite
def schedules(draw):
    return SCHEDULES[draw(NAMES)](draw(STAGES), draw(MICROBATCHES))


@given(schedules())
@properties
def test_verify_accepts_every_schedule_that_a_name_stands_for(schedule):
    verify(schedule)
    ran = [op for row in schedule.ticks for cell in row for op in cell]
    assert len(ran) == 2 * schedule.num_stages * schedule.num_microbatches == len(schedule.when())


@given(STAGES, MICROBATCHES)
@properties
def test_tables_have_no_more_ticks_than_they_need(stages, microbatches):
    ticks = {name: len(SCHEDULES[name](stages, microbatches).ticks) for name in ("1f1b", "gpipe")}
    assert ticks == {
        "1f1b": microbatches + 2 * (stages - 1),
        "gpipe": 2 * (microbatches + stages - 1),
    }


@given(STAGES, MICROBATCHES)
@properties
def test_forward_only_runs_every_forward_and_no_backward(stages, microbatches):
    schedule = forward_only(stages, microbatches)
    verify(schedule)
    assert not schedule.has_backward()
    assert len(schedule.when()) == stages * microbatches
    assert len(schedule.ticks) == stages + microbatches - 1


@given(schedules())
@properties
def test_bubble_fraction_is_the_papers_when_forward_and_backward_cost_the_same(schedule):
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    expected = (stages - 1) / (microbatches + stages - 1)
    assert bubble_fraction(schedule) == pytest.approx(expected, abs=1e-12)


@given(STAGES, MICROBATCHES, st.floats(0.1, 10), st.floats(0.1, 10))
@properties
def test_1f1b_with_ticks_of_both_takes_one_pair_per_microbatch_and_stage(
    stages, microbatches, forward_time, backward_time
):
    schedule = SCHEDULES["1f1b"](stages, microbatches)
    expected = (microbatches + stages - 1) * (forward_time + backward_time)
    assert synchronous_time(schedule, forward_time, backward_time) == pytest.approx(expected)


@given(STAGES, MICROBATCHES)
@properties
def test_in_flight_is_bounded_by_stages_for_1f1b_and_is_all_for_gpipe(stages, microbatches):
    lean, full = (
        max_in_flight(SCHEDULES[name](stages, microbatches)) for name in ("1f1b", "gpipe")
    )
    assert lean == [min(microbatches, 2 * (stages - 1 - s) + 1) for s in range(stages)]
    assert max(lean) <= 2 * stages - 1
    assert full == [microbatches] * stages


def label(op: Op, stage: int) -> str:
    return rf"\b{op.kind}{op.microbatch} on stage {stage}\b"


@st.composite
def places(draw):
    """A schedule and one of its operations: (schedule, tick, stage, op)."""
    schedule = draw(schedules())
    (kind, microbatch, stage), tick = draw(st.sampled_from(sorted(schedule.when().items())))
    return schedule, tick, stage, Op(kind, microbatch)


def edit(schedule: Schedule, tick: int, stage: int, cell: tuple[Op, ...]) -> Schedule:
    """Returns the schedule with another cell in that place."""
    rows = [list(row) for row in schedule.ticks]
    rows[tick][stage] = cell
    return dataclasses.replace(schedule, ticks=tuple(tuple(row) for row in rows))


def move(place: tuple[Schedule, int, int, Op], to_tick: int) -> Schedule:
    """Returns the schedule with the operation alone in a new tick in front of `to_tick`."""
    schedule, tick, stage, op = place
    without = tuple(other for other in schedule.ticks[tick][stage] if other != op)
    rows = list(edit(schedule, tick, stage, without).ticks)
    rows.insert(to_tick, tuple((op,) if s == stage else () for s in range(schedule.num_stages)))
    return dataclasses.replace(schedule, ticks=tuple(rows))


@given(places())
@properties
def test_verify_refuses_a_dropped_operation_by_name(place):
    schedule, tick, stage, op = place
    # Without its one backward a table is a forward-only one.
    assume((op.kind, schedule.num_stages, schedule.num_microbatches) != (BACKWARD, 1, 1))
    without = tuple(other for other in schedule.ticks[tick][stage] if other != op)
    with pytest.raises(ValueError, match=f"{label(op, stage)}(, which)? never runs"):
        verify(edit(schedule, tick, stage, without))


@given(places(), st.data())
@properties
def test_verify_refuses_a_repeated_operation_by_name_and_ticks(place, data):
    schedule, tick, stage, op = place
    other = data.draw(st.sampled_from([t for t in range(len(schedule.ticks) + 1) if t != tick + 1]))
    rows = list(schedule.ticks)
    rows.insert(other, tuple((op,) if s == stage else () for s in range(schedule.num_stages)))
    first, second = sorted((other, tick + (other <= tick)))
    with pytest.raises(ValueError, match=f"{label(op, stage)} runs twice: .*{first} and {second}"):
        verify(dataclasses.replace(schedule, ticks=tuple(rows)))


@given(places())
@properties
def test_verify_refuses_an_operation_before_what_it_needs(place):
    schedule, _, stage, op = place
    when, last = schedule.when(), schedule.num_stages - 1
    assume((op.kind, stage) != (FORWARD, 0))  # it needs nothing
    if op.kind == FORWARD:
        need = (FORWARD, op.microbatch, stage - 1)
    elif stage < last:
        need = (BACKWARD, op.microbatch, stage + 1)
    else:
        need = (FORWARD, op.microbatch, stage)
    tick = when[need]
    with pytest.raises(ValueError, match=rf"{label(op, stage)} in tick {tick} needs"):
        verify(move(place, tick))


@given(places())
@properties
def test_verify_refuses_an_operation_after_what_needs_it(place):
    schedule, _, stage, op = place
    assume((op.kind, stage) != (BACKWARD, 0))  # nothing needs it
    end = len(schedule.ticks)
    with pytest.raises(ValueError, match=rf"needs {label(op, stage)}, which runs in tick {end}"):
        verify(move(place, end))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_verify_refuses_what_a_neighbour_makes_in_the_same_tick(stage):
    schedule, op = SCHEDULES["gpipe"](4, 2), Op(FORWARD, 0)
    late = edit(schedule, stage, stage, ())
    with pytest.raises(ValueError, match=f"{label(op, stage)} in tick {stage - 1} needs F0"):
        verify(edit(late, stage - 1, stage, (op,)))


@pytest.mark.parametrize(
    "cell",
    [(Op(BACKWARD, 0), Op(FORWARD, 1)), (Op(FORWARD, 1), Op(FORWARD, 0))],
    ids=["backward first", "two forwards"],
)
def test_verify_refuses_a_cell_in_another_order_by_its_place(cell):
    schedule = Schedule(name="x", num_stages=1, num_microbatches=2, ticks=(((),), (cell,)))
    with pytest.raises(ValueError, match="tick 1, stage 0: a cell holds at most one F, then one B"):
        verify(schedule)


@pytest.mark.parametrize("op", [Op("W", 0), Op(FORWARD, 2), Op(BACKWARD, -1)], ids=str)
def test_verify_refuses_what_is_no_operation(op):
    schedule = SCHEDULES["gpipe"](2, 2)
    with pytest.raises(ValueError, match=f"{op.kind}{op.microbatch} on stage 1 is no operation"):
        verify(edit(schedule, 0, 1, (op,)))


def test_verify_refuses_a_tick_without_all_stages():
    schedule = SCHEDULES["gpipe"](2, 2)
    with pytest.raises(ValueError, match="tick 1 has 1 stages, not 2"):
        verify(dataclasses.replace(schedule, ticks=(schedule.ticks[0], ((),))))


def test_draw_shows_a_stage_per_line_and_a_tick_per_column():
    assert draw(SCHEDULES["1f1b"](2, 3)) == (
        "tick    0    1    2    3    4\n"
        "stage 0 F0   F1   F2B0 B1   B2\n"
        "stage 1 .    F0B0 F1B1 F2B2 ."
    )


def test_command_line_prints_the_table_and_its_figures(capsys):
    main(["--schedule=gpipe", "--stages=2", "--microbatches=3"])
    printed = capsys.readouterr().out
    assert draw(SCHEDULES["gpipe"](2, 3)) in printed
    assert re.search(r"^bubble fraction .* 0\.250$", printed, re.MULTILINE)
    assert re.search(r"^most microbatches in flight.* \[3, 3\]$", printed, re.MULTILINE)


@pytest.mark.parametrize("argument", ["--schedule=zigzag", "--stages=0", "--microbatches=-1"])
def test_command_line_refuses_bad_arguments_by_name(argument, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([argument])
    assert argument.partition("=")[0] in capsys.readouterr().err


def test_config_refuses_an_unknown_schedule_and_lists_the_known():
    with pytest.raises(ValueError, match=r"pipeline\.schedule='1f2b' is unknown.* gpipe, 1f1b"):
        PipelineConfig(schedule="1f2b")
