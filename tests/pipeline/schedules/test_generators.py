"""Built-in schedules of every size: as fast and as lean as the papers and our formulas state."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.schedules.generators import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from pipeline.schedules.simulate import (
    OperationTimes,
    bubble_fraction,
    free_running,
    synchronous_time,
)
from pipeline.schedules.table import max_in_flight, v_placement, verify
from tests.pipeline.schedules.tables import CHUNKS, MICROBATCHES, STAGES, properties

TIME = st.floats(0.1, 10)
EQUAL = OperationTimes(forward=1, backward=1)


#: Tolerance for sums of up to a few thousand floats.
def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def of(schedule, other) -> bool:
    """Return whether two schedules have the same table, regardless of their names."""
    return (schedule.placement, schedule.ticks) == (other.placement, other.ticks)


@given(STAGES, MICROBATCHES)
@properties
def test_tables_have_no_more_ticks_than_they_need(stages, microbatches):
    assert len(one_f_one_b(stages, microbatches).ticks) == microbatches + 2 * (stages - 1)
    assert len(gpipe(stages, microbatches).ticks) == 2 * (microbatches + stages - 1)


@given(STAGES, MICROBATCHES, CHUNKS, st.booleans())
@properties
def test_forward_only_runs_every_forward_as_soon_as_it_can(S, M, V, v_shape):
    placement = v_placement(S) if v_shape else None
    V = 2 if v_shape else V
    schedule = forward_only(S, M, V, placement)
    verify(schedule)
    assert not schedule.has_backward() and not schedule.splits_backward()
    assert len(schedule.when()) == S * V * M
    # The last stage's own work, after the first forward has reached it; on a V the last virtual
    # stage is on stage 0, so the way back counts too.
    back = S - 1 if v_shape else 0
    assert len(schedule.ticks) == max(V * M + S - 1 + back, V * S + M - 1)


@given(st.data(), STAGES, MICROBATCHES, CHUNKS)
@properties
def test_forward_only_works_for_any_placement(data, S, M, V):
    placement = data.draw(st.permutations([*range(S)] * V))
    schedule = forward_only(S, M, V, placement)
    verify(schedule)
    assert schedule.placement == tuple(placement)


@given(STAGES, MICROBATCHES)
@properties
def test_bubble_of_gpipe_and_1f1b_is_the_papers(S, M):
    for schedule in (gpipe(S, M), one_f_one_b(S, M)):
        assert bubble_fraction(schedule, EQUAL) == close((S - 1) / (M + S - 1))


@given(STAGES, MICROBATCHES, CHUNKS)
@properties
def test_bubble_over_chunks_is_that_of_a_chunk(S, M, V):
    for schedule in (gpipe(S, max(S, M), V), interleaved_1f1b(S, max(S, M), V)):
        expected = (S - 1) / (V * max(S, M) + S - 1)
        assert bubble_fraction(schedule, EQUAL) == close(expected)
        assert bubble_fraction(schedule, EQUAL, clock=synchronous_time) == close(expected)


@given(STAGES, MICROBATCHES, TIME, TIME)
@properties
def test_1f1b_in_ticks_takes_one_pair_per_microbatch_and_stage(S, M, forward, backward):
    times = OperationTimes(forward=forward, backward=backward)
    step_time = synchronous_time(one_f_one_b(S, M), times)
    assert step_time == close((M + S - 1) * (forward + backward))


@given(STAGES, MICROBATCHES, CHUNKS, TIME, TIME)
@properties
def test_interleaved_in_ticks_takes_one_pair_per_chunk_and_stage(S, M, V, forward, backward):
    schedule = interleaved_1f1b(S, M, V)
    pairs = V * M + S - 1 if M >= S else M + V * S - 1
    expected = pairs * (forward + backward) / V
    times = OperationTimes(forward=forward, backward=backward)
    assert synchronous_time(schedule, times) == close(expected)


@given(STAGES, MICROBATCHES)
@properties
def test_interleaved_over_one_chunk_is_1f1b(S, M):
    assert of(interleaved_1f1b(S, M, 1), one_f_one_b(S, M))


@given(STAGES, MICROBATCHES, CHUNKS)
@properties
def test_in_flight_is_bounded_for_all_but_gpipe(S, M, V):
    lean = max_in_flight(one_f_one_b(S, M))
    assert lean == [min(M, 2 * (S - 1 - stage) + 1) for stage in range(S)]
    assert max_in_flight(gpipe(S, M, V)) == [V * M] * S
    first_group = M if M < S else -(-M // (M // S))
    assert max(max_in_flight(interleaved_1f1b(S, M, V))) <= min(
        V * M, (V - 1) * max(S, first_group) + 2 * S - 1
    )
    assert max(max_in_flight(zero_bubble(S, M))) <= max(lean)
    assert max(max_in_flight(zbv(S, M))) <= 2 * max(lean)


@given(STAGES, MICROBATCHES)
@properties
def test_zero_bubble_loses_least_of_all_tables_with_one_chunk(S, M):
    # Lower bounds: S forwards and S-1 input gradients precede the first input gradient on stage 0,
    # where M input and M weight gradients follow. The last stage starts after S-1 forwards and then
    # runs 3M operations.
    bound = max(2 * S - 1 + 2 * M, 3 * M + S - 1)
    assert free_running(zero_bubble(S, M)) == close(bound)
    if M >= S:
        assert bubble_fraction(zero_bubble(S, M)) == close((S - 1) / (3 * M + S - 1))
    if M >= 2 * S - 2:
        assert synchronous_time(zero_bubble(S, M)) == close(bound)


@given(st.integers(2, 8), MICROBATCHES)
@properties
def test_zero_bubble_schedules_beat_1f1b_and_zbv_beats_the_other(S, M):
    plain = one_f_one_b(S, M)
    split = zero_bubble(S, M)
    folded = zbv(S, M)
    assert bubble_fraction(folded) < bubble_fraction(split) < bubble_fraction(plain)
    for schedule in (split, folded):
        assert synchronous_time(schedule) < synchronous_time(plain)


@given(st.integers(2, 8), MICROBATCHES, TIME, TIME, TIME)
@properties
def test_zero_bubble_schedules_never_lose_unless_W_is_the_longest(S, M, F, I, W):  # noqa: E741
    times = OperationTimes(forward=F, input_gradient=I, weight_gradient=min(W, max(F, I)))
    for clock in (free_running, synchronous_time):
        plain = clock(one_f_one_b(S, M), times)
        for schedule in (zero_bubble(S, M), zbv(S, M)):
            assert clock(schedule, times) <= plain * (1 + 1e-9)


@given(STAGES, MICROBATCHES)
@properties
def test_zbv_loses_half_of_zero_bubble_once_it_is_full(S, M):
    M = max(M, 2 * S)
    assert free_running(zbv(S, M)) == close(3 * M + (S - 1) / 2)
    assert synchronous_time(zbv(S, M)) == close(3 * M + S - 1)


@given(STAGES, MICROBATCHES, TIME, TIME, TIME)
@properties
def test_zero_bubble_takes_the_papers_time_if_W_is_the_shortest(
    S,
    M,
    F,
    I,  # noqa: E741
    W,
):
    M = max(M, 2 * S - 2)
    times = OperationTimes(forward=F, input_gradient=I, weight_gradient=W)
    expected = M * (F + I + W) + (S - 1) * (max(F, W) + max(I, W) - W)
    assert synchronous_time(zero_bubble(S, M), times) == close(expected)
    if W == min(F, I, W):
        assert expected == close(M * (F + I + W) + (S - 1) * (F + I - W))
    assert free_running(zero_bubble(S, M), times) <= expected * (1 + 1e-9)


@given(STAGES, MICROBATCHES)
@properties
def test_the_middle_of_a_step_is_the_same_work_on_every_stage(S, M):
    """In these ticks no stage waits for another, for any F, I and W."""
    for schedule, expected in (
        (zero_bubble(S, M), M - 2 * (S - 1)),
        (zbv(S, M), 2 * (M - 2 * S + 1 - S // 2)),
    ):
        kinds = Counter(
            tuple("".join(op.kind for op in cell) for cell in row) for row in schedule.ticks
        )
        assert kinds[("FIW",) * S] == max(0, expected)


@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble])
def test_schedules_of_one_chunk_refuse_more_with_a_remedy(make):
    with pytest.raises(ValueError, match=r"exactly 1 chunk .*pipeline\.chunks=2.*interleaved_1f1b"):
        make(4, 8, 2)


def test_zbv_refuses_other_chunks_than_two():
    with pytest.raises(ValueError, match=r"exactly 2 chunks .*pipeline\.chunks=3; set pipeline\."):
        zbv(4, 8, 3)
