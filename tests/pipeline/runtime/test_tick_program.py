"""Tick programs, run by an independent simulation (simulated_ticks.py)."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.tick_program import make_tick_program
from pipeline.schedule import SCHEDULES, forward_only, make_schedule
from pipeline.schedules.table import Op, Schedule, verify
from tests.pipeline.runtime.simulated_ticks import simulate
from tests.pipeline.schedules.tables import properties, schedules


@st.composite
def random_tables(draw):
    """Draw a table with any order and any placement that satisfies the rules of a table."""
    S = draw(st.integers(1, 4))
    V = draw(st.integers(1, 3))
    M = draw(st.integers(1, 5))
    placement = tuple(draw(st.permutations([*range(S)] * V)))
    splits = draw(st.booleans())
    trains = draw(st.integers(0, 4)) > 0
    rng = draw(st.randoms(use_true_random=False))
    backward = "I" if splits else "B"
    done: dict[tuple[str, int, int], int] = {}
    kinds = ["F"] if not trains else ["F", "I", "W"] if splits else ["F", "B"]
    left = {(kind, m, v) for kind in kinds for m in range(M) for v in range(S * V)}

    def ready(kind, m, v, tick):
        if kind == "F":
            return v == 0 or done.get(("F", m, v - 1), tick) < tick
        if kind == "W":
            return ("I", m, v) in done
        after = v == S * V - 1 or done.get((backward, m, v + 1), tick) < tick
        return after and ("F", m, v) in done

    ticks = []
    while left:
        tick = len(ticks)
        row = []
        for stage in range(S):
            cell = []
            for kind in kinds:
                ops = sorted(
                    op
                    for op in left
                    if op[0] == kind and placement[op[2]] == stage and ready(*op, tick)
                )
                if ops and rng.random() < 0.7:
                    op = rng.choice(ops)
                    left.remove(op)
                    done[op] = tick
                    cell.append(Op(kind, op[1], placement[: op[2]].count(stage)))
            row.append(tuple(cell))
        if any(row):
            ticks.append(tuple(row))
    schedule = Schedule(
        name="random",
        num_stages=S,
        num_chunks=V,
        num_microbatches=M,
        placement=placement,
        ticks=tuple(ticks),
    )
    verify(schedule)
    return schedule


SMALL = schedules(stages=st.integers(1, 5), microbatches=st.integers(1, 9))


@pytest.mark.thorough
@given(SMALL, st.booleans(), st.booleans())
@settings(properties, max_examples=200)
def test_program_provides_the_inputs_of_every_operation(schedule, recomputes, shares_vocab):
    simulate(schedule, recomputes=recomputes, shares_vocab=shares_vocab)


@pytest.mark.thorough
@given(random_tables(), st.booleans(), st.booleans())
@settings(properties, max_examples=200)
def test_program_of_any_order_and_placement_provides_all_inputs(schedule, recomputes, shares_vocab):
    simulate(schedule, recomputes=recomputes, shares_vocab=shares_vocab)


@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.booleans())
@properties
def test_program_of_forwards_provides_all_inputs(data, S, M, V, shares_vocab):
    placement = data.draw(st.permutations([*range(S)] * V))
    ran = simulate(forward_only(S, M, V, placement), shares_vocab=shares_vocab)
    assert set(ran.program.num_slots) == {"input"}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("shares_vocab", [False, True])
@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_program_of_1f1b_does_not_grow_with_microbatches(num_stages, recomputes, shares_vocab):
    def num_slots(name, M):
        schedule = make_schedule(name, num_stages, M, 1)
        return make_tick_program(
            schedule, recomputes=recomputes, shares_vocab=shares_vocab
        ).num_slots

    for name in ("1f1b", "interleaved_1f1b", "zero_bubble"):
        few = num_slots(name, 2 * num_stages)
        assert all(num_slots(name, M) == few for M in (2 * num_stages + 1, 4 * num_stages, 40))
    # Control: with gpipe every microbatch waits for the turning point.
    kept = "input" if recomputes else "saved"
    if num_stages > 1 or not recomputes:
        assert num_slots("gpipe", 40)[kept] == 40


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_program_of_1f1b_keeps_as_many_inputs_as_the_formula_says(num_stages):
    """Stage s receives an input in tick m+s-1 and reads it last in tick m+2(S-1)-s.

    An input arrives at the end of a tick, so it occupies a slot for 2(S-s)-1 ticks, and as many are
    held at once. The maximum is on stage 1, because stage 0 embeds its own inputs.
    """
    program = make_tick_program(make_schedule("1f1b", num_stages, 4 * num_stages, 1))
    assert program.num_slots["input"] == 2 * (num_stages - 1) - 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_program_drops_ticks_only_if_the_last_forward_is_folded(name):
    dropped = {}
    for recomputes in (True, False):
        for shares_vocab in (False, True):
            schedule = make_schedule(name, 3, 4, 2 if name == "zbv" else 1)
            program = make_tick_program(schedule, recomputes=recomputes, shares_vocab=shares_vocab)
            (num_ticks,) = {len(table) for table in jax.tree.leaves(program.table)}
            dropped[recomputes, shares_vocab] = len(schedule.ticks) - num_ticks
    # In GPipe the last forward has a tick to itself; in other schedules other stages work then.
    assert dropped.pop((True, False)) == (1 if name == "gpipe" else 0)
    assert set(dropped.values()) == {0}


def test_program_of_whole_and_split_backwards_is_refused():
    ticks = (((Op("F", 0), Op("B", 0)),), ((Op("F", 1), Op("I", 1), Op("W", 1)),))
    schedule = Schedule(
        name="mixed", num_stages=1, num_chunks=1, num_microbatches=2, placement=(0,), ticks=ticks
    )
    verify(schedule)  # the table itself is valid
    with pytest.raises(ValueError, match=r"schedule mixed has whole backwards \(B\) and split"):
        make_tick_program(schedule)
