"""Tables that `verify` accepts and rejects, compared with an independent check."""

import dataclasses
import re

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from pipeline.schedules.generators import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from pipeline.schedules.table import (
    Op,
    Schedule,
    max_in_flight,
    needs,
    v_placement,
    verify,
)
from tests.pipeline.schedules.tables import (
    places,
    properties,
    schedules,
    with_cell,
    with_tick,
    without,
)


def is_valid(schedule: Schedule) -> bool:
    """Play the table tick by tick; every operation must find its inputs."""
    held = {
        stage: [v for v, where in enumerate(schedule.placement) if where == stage]
        for stage in range(schedule.num_stages)
    }
    last = len(schedule.placement) - 1
    done = set()
    for row in schedule.ticks:
        made = set()
        for stage, cell in enumerate(row):
            if not re.fullmatch("F?[BI]?W?", "".join(op.kind for op in cell)):
                return False
            own = set()
            for kind, m, chunk in cell:
                if not (0 <= m < schedule.num_microbatches and 0 <= chunk < schedule.num_chunks):
                    return False
                v = held[stage][chunk]
                here = own | done
                after = {(kind, m, v + 1) for kind in "BI"}
                if kind == "F":
                    fine = v == 0 or ("F", m, v - 1) in done
                elif kind == "W":
                    fine = ("I", m, v) in here
                else:
                    fine = ("F", m, v) in here and (v == last or bool(after & done))
                if not fine or (kind, m, v) in here | made:
                    return False
                own.add((kind, m, v))
            made |= own
        done |= made
    kinds = {
        frozenset(kind for kind in "FBIW" if (kind, m, v) in done)
        for m in range(schedule.num_microbatches)
        for v in range(last + 1)
    }
    return kinds == {frozenset("F")} or kinds <= {frozenset("FB"), frozenset("FIW")}


def label(op: Op, stage: int) -> str:
    return rf"\b{op.kind}{op.microbatch}( of chunk {op.chunk})? on stage {stage}\b"


@given(schedules())
@properties
def test_verify_accepts_every_schedule_that_a_name_stands_for(schedule):
    verify(schedule)
    assert is_valid(schedule)
    counts = {kind: 0 for kind in "FBIW"}
    for _, _, cell in schedule.cells():
        for op in cell:
            counts[op.kind] += 1
    each = len(schedule.placement) * schedule.num_microbatches
    split = schedule.splits_backward()
    assert counts == {"F": each, "B": 0 if split else each, "I": each * split, "W": each * split}
    assert len(schedule.when()) == sum(counts.values())


@st.composite
def mutants(draw):
    """Draw a table with one fault: (fault, operations concerned, table).

    By chance the mutated table may still be valid.
    """
    schedule, tick, stage, op = draw(places())
    fault = draw(st.sampled_from(["drop", "repeat", "shift", "swap", "alter"]))
    if fault == "drop":
        return fault, {op}, without(schedule, tick, stage, op)
    if fault == "alter":
        other = draw(
            st.sampled_from("FBIW").map(lambda kind: op._replace(kind=kind))
            | st.integers(-1, schedule.num_microbatches).map(lambda m: op._replace(microbatch=m))
            | st.integers(-1, schedule.num_chunks).map(lambda c: op._replace(chunk=c))
        )
        cell = tuple(other if o == op else o for o in schedule.ticks[tick][stage])
        parts = {op._replace(kind="W")} if {op.kind, other.kind} == {"B", "I"} else set()
        return fault, {op, other, *parts}, with_cell(schedule, tick, stage, cell)
    to_tick = draw(st.integers(0, len(schedule.ticks) - 1))
    if fault == "swap":
        cell = schedule.ticks[to_tick][stage]
        assume(cell)
        other = draw(st.sampled_from(cell))
        exchange = {op: other, other: op}
        for t in {tick, to_tick}:
            cell = tuple(exchange.get(o, o) for o in schedule.ticks[t][stage])
            schedule = with_cell(schedule, t, stage, cell)
        return fault, {op, other}, schedule
    to_stage = draw(st.integers(0, schedule.num_stages - 1))
    if fault == "shift":
        schedule = without(schedule, tick, stage, op)
    cell = schedule.ticks[to_tick][to_stage]
    at = draw(st.integers(0, len(cell)))
    return fault, {op}, with_cell(schedule, to_tick, to_stage, (*cell[:at], op, *cell[at:]))


@pytest.mark.thorough
@given(mutants())
@settings(properties, max_examples=400)
def test_verify_rejects_exactly_the_unplayable_tables_and_names_the_operation(mutant):
    fault, ops, schedule = mutant
    if is_valid(schedule):
        event(f"{fault}: still valid")
        verify(schedule)
        return
    event(f"{fault}: refused")
    with pytest.raises(ValueError) as error:
        verify(schedule)
    names = "|".join(rf"{op.kind}{op.microbatch}\b" for op in ops)
    assert re.search(rf"(?<!\w)({names})", str(error.value)), str(error.value)


@given(places())
@properties
def test_verify_refuses_a_dropped_operation_by_name(place):
    schedule, tick, stage, op = place
    # A table without its only backward is a valid forward-only table.
    assume(op.kind != "B" or sum(len(cell) for *_, cell in schedule.cells()) > 2)
    with pytest.raises(ValueError, match=f"{label(op, stage)}(, which)? never runs"):
        verify(without(schedule, tick, stage, op))


@given(places(), st.data())
@properties
def test_verify_refuses_a_repeated_operation_by_name_and_ticks(place, data):
    schedule, tick, stage, op = place
    other = data.draw(st.integers(0, len(schedule.ticks)))
    first, second = sorted((other, tick + (other <= tick)))
    with pytest.raises(ValueError, match=f"{label(op, stage)} runs twice: .*{first} and {second}"):
        verify(with_tick(schedule, other, stage, op))


def moved(place, before: int) -> Schedule:
    schedule, tick, stage, op = place
    return with_tick(without(schedule, tick, stage, op), before, stage, op)


@given(places())
@properties
def test_verify_rejects_an_operation_before_its_inputs(place):
    schedule, _, stage, op = place
    when = schedule.when()
    key = (op.kind, op.microbatch, schedule.virtual_stage(stage, op.chunk))
    needed = needs(key, when, len(schedule.placement))
    assume(needed)
    tick = min(when[need] for need in needed)
    with pytest.raises(ValueError, match=rf"{label(op, stage)} in tick {tick} needs"):
        verify(moved(place, tick))


@given(places())
@properties
def test_verify_rejects_an_operation_after_its_readers(place):
    schedule, _, stage, op = place
    virtual = schedule.virtual_stage(stage, op.chunk)
    assume(op.kind != "W" and (op.kind, virtual) != ("B", 0))  # nothing needs these
    end = len(schedule.ticks)
    with pytest.raises(ValueError, match=rf"needs {label(op, stage)}, which runs in tick {end}"):
        verify(moved(place, end))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_verify_rejects_inputs_from_another_stage_in_the_same_tick(stage):
    op = Op("F", 0)
    late = with_cell(gpipe(4, 2), stage, stage, ())
    with pytest.raises(ValueError, match=f"{label(op, stage)} in tick {stage - 1} needs F0 on"):
        verify(with_cell(late, stage - 1, stage, (op,)))


def test_verify_rejects_inputs_from_another_chunk_in_the_same_tick():
    schedule = Schedule(
        name="x",
        num_stages=1,
        num_chunks=2,
        num_microbatches=1,
        placement=(0, 0),
        ticks=(((Op("F", 0, 0),),), ((Op("F", 0, 1), Op("B", 0, 1)),), ((Op("B", 0, 0),),)),
    )
    verify(schedule)
    early = with_cell(with_cell(schedule, 1, 0, (Op("F", 0, 1),)), 2, 0, (Op("B", 0, 1),))
    early = with_tick(early, 2, 0, Op("B", 0, 0))
    with pytest.raises(ValueError, match="B0 of chunk 0 on stage 0 in tick 2 needs B0 of chunk 1"):
        verify(early)


@pytest.mark.parametrize("kind", ["B", "I"])
def test_verify_rejects_a_whole_backward_together_with_its_parts(kind):
    schedule = zero_bubble(2, 2)
    tick = schedule.when()["I", 1, 0]
    if kind == "B":  # an I becomes a B, and its W stays
        cell = tuple(
            op._replace(kind="B") if op.kind == "I" else op for op in schedule.ticks[tick][0]
        )
        schedule = with_cell(schedule, tick, 0, cell)
    else:
        schedule = with_tick(schedule, len(schedule.ticks), 0, Op("B", 1))
    with pytest.raises(ValueError, match="B1 on stage 0 .* whole backward, but its part [IW]1"):
        verify(schedule)


def test_verify_accepts_whole_and_split_backwards_of_different_microbatches():
    schedule = zero_bubble(2, 2)
    when = schedule.when()
    for virtual in (0, 1):
        schedule = without(schedule, when["W", 1, virtual], virtual, Op("W", 1))
        tick = when["I", 1, virtual]
        cell = schedule.ticks[tick][virtual]
        swapped = tuple(Op("B", 1) if op == Op("I", 1) else op for op in cell)
        schedule = with_cell(schedule, tick, virtual, swapped)
    verify(schedule)


@pytest.mark.parametrize(
    "cell",
    [
        (Op("B", 0), Op("F", 1)),
        (Op("F", 1), Op("F", 0)),
        (Op("W", 0), Op("I", 1)),
        (Op("I", 0), Op("B", 1)),
    ],
    ids=["backward first", "two forwards", "weight gradient first", "two backwards"],
)
def test_verify_refuses_a_cell_in_another_order_by_its_place(cell):
    schedule = dataclasses.replace(gpipe(1, 2), ticks=(((),), (cell,)))
    with pytest.raises(ValueError, match="tick 1, stage 0: the cell .* at most one F, then one B"):
        verify(schedule)


@pytest.mark.parametrize("op", [Op("X", 0), Op("F", 2), Op("B", -1), Op("F", 0, 1)], ids=str)
def test_verify_rejects_unknown_operations(op):
    schedule = with_cell(gpipe(2, 2), 0, 1, (op,))
    named = f"tick 0, stage 1: {op.kind}{op.microbatch} of chunk {op.chunk} is not an operation"
    with pytest.raises(ValueError, match=named):
        verify(schedule)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((0, 1, 0), "3 virtual stages, not 2 stages × 2 chunks"),
        ((0, 1, 2, 1), "virtual stage 2 is placed on stage 2; there are 2"),
        ((0, 1, 0, 0), "stage 0 holds 3 virtual stages; every stage must hold 2"),
    ],
)
def test_verify_refuses_a_bad_placement(placement, message):
    schedule = dataclasses.replace(interleaved_1f1b(2, 4, 2), placement=placement)
    with pytest.raises(ValueError, match=message):
        verify(schedule)


def test_verify_refuses_a_table_for_another_placement():
    with pytest.raises(ValueError, match=r"F0 of chunk \d on stage \d in tick \d+ needs"):
        verify(dataclasses.replace(interleaved_1f1b(2, 4, 2), placement=v_placement(2)))


def test_verify_refuses_a_tick_without_all_stages():
    schedule = gpipe(2, 2)
    with pytest.raises(ValueError, match="tick 1 has 1 stages, not 2"):
        verify(dataclasses.replace(schedule, ticks=(schedule.ticks[0], ((),))))


def test_virtual_stages_and_chunks_say_the_same():
    for schedule in (interleaved_1f1b(3, 5, 4), zbv(3, 5, 2)):
        for virtual, stage in enumerate(schedule.placement):
            assert schedule.virtual_stage(stage, schedule.chunk_of(virtual)) == virtual
    assert zbv(3, 5).virtual_stage(0, 1) == 5


def test_max_in_flight_counts_from_forward_to_backward_or_weight_gradient():
    assert max_in_flight(one_f_one_b(3, 8)) == [5, 3, 1]
    assert max_in_flight(gpipe(2, 3, 2)) == [6, 6]
    held = Schedule(
        name="x",
        num_stages=1,
        num_chunks=1,
        num_microbatches=2,
        placement=(0,),
        ticks=(((Op("F", 0), Op("I", 0)),), ((Op("F", 1), Op("I", 1), Op("W", 0)),)),
    )
    assert max_in_flight(held) == [2]
