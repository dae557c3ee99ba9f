"""Step times, checked by hand on tables that are small enough to count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.schedules.generators import (
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
    free_running_spans,
    synchronous_spans,
    synchronous_time,
)
from pipeline.schedules.table import needs
from tests.pipeline.schedules.tables import properties, schedules

TIME = st.floats(0.1, 10)
SEND = st.sampled_from([0.0, 0.3, 5.0])
TIMES = st.builds(
    OperationTimes,
    forward=TIME,
    backward=TIME,
    input_gradient=TIME,
    weight_gradient=TIME,
    send=SEND,
)


def test_backward_takes_the_time_of_its_parts_by_default():
    assert OperationTimes(input_gradient=2, weight_gradient=0.5).of("B") == 2.5
    assert OperationTimes(backward=1.5).of("B") == 1.5


def test_one_stage_has_no_bubble_and_sends_nothing():
    times = OperationTimes(forward=2, input_gradient=1, weight_gradient=3, send=7)
    for schedule in (gpipe(1, 4, 3), one_f_one_b(1, 4), zero_bubble(1, 4), zbv(1, 4)):
        assert free_running(schedule, times) == pytest.approx(4 * 6)
        assert synchronous_time(schedule, times) == pytest.approx(4 * 6)
        assert bubble_fraction(schedule, times) == pytest.approx(0, abs=1e-12)


def test_free_running_sends_delay_who_waits_for_them():
    # Two stages and one microbatch run F, send, F, B, send, B.
    assert free_running(gpipe(2, 1), OperationTimes(forward=1, backward=2, send=0.5)) == 7
    # On a V the two middle virtual stages share a stage, so 2 of the 6 hops need no send.
    assert free_running(zbv(2, 1), OperationTimes(send=10)) == pytest.approx(
        4 * 0.5 + 4 * 0.5 + 0.5 + 40
    )


@pytest.mark.parametrize("send", [0.0, 0.5, 1.0])
def test_synchronous_sends_hide_behind_the_rest_of_their_cell(send):
    # Ticks as stage 0 | stage 1: F0 | -, F1 | F0 B0, B0 | F1 B1, B1 | -. The sends of F0, B0 and B1
    # come last in their ticks, so nothing hides them.
    times = OperationTimes(forward=1, backward=2, send=send)
    assert synchronous_time(one_f_one_b(2, 2), times) == 1 + 3 + 3 + 2 + 3 * send
    # Ticks: F0 | -, F1 | F0 I0, two full ticks of F I W, I2 W2 | F3 I3, I3 | W2, W3 | W3. In the
    # full ticks the send of F hides behind I and W, and the send of I behind W.
    assert synchronous_time(zero_bubble(2, 4), OperationTimes(send=send)) == 13 + 3 * send


def test_synchronous_sends_that_are_long_show_in_full_ticks_too():
    # In a full tick of 3, F ends at 1 and I at 2: a send above 1 makes the tick wait for I's send.
    assert synchronous_time(zero_bubble(2, 4), OperationTimes(send=1.5)) == 13 + 3 * 1.5 + 2 * 0.5


@given(schedules(), TIMES)
@properties
def test_spans_respect_stages_and_needs_under_both_clocks(schedule, times):
    placement = schedule.placement
    for spans, step_time in (
        (free_running_spans(schedule, times), free_running(schedule, times)),
        (synchronous_spans(schedule, times), synchronous_time(schedule, times)),
    ):
        at = {
            (s.op.kind, s.op.microbatch, schedule.virtual_stage(s.stage, s.op.chunk)): s
            for s in spans
        }
        assert len(at) == len(spans) == len(schedule.when())
        slack = 1e-9 * step_time
        for key, span in at.items():
            for need in needs(key, at, len(placement)):
                crosses = placement[need[2]] != span.stage
                assert at[need].end + times.send * crosses <= span.start + slack
        for stage in range(schedule.num_stages):
            own = sorted((s.start, s.end) for s in spans if s.stage == stage)
            assert all(a[1] <= b[0] + slack for a, b in zip(own, own[1:], strict=False))
        assert max(s.end for s in spans) <= step_time + slack


@given(schedules(), TIMES)
@properties
def test_ticks_never_make_a_step_faster(schedule, times):
    free = free_running(schedule, times)
    ticks = synchronous_time(schedule, times)
    assert free <= ticks * (1 + 1e-9)
    for clock in (free_running, synchronous_time):
        assert -1e-9 <= bubble_fraction(schedule, times, clock=clock) < 1


def test_a_chunk_takes_its_share_of_a_stage():
    times = OperationTimes(forward=1, backward=2)
    assert synchronous_time(interleaved_1f1b(4, 8, 2), times) == pytest.approx((2 * 8 + 3) * 3 / 2)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_reject_invalid_values(value):
    with pytest.raises(ValueError, match="time send=.* must be a finite number at least 0"):
        OperationTimes(send=value)
    with pytest.raises(ValueError, match="time forward=.* must be a finite number above 0"):
        OperationTimes(forward=value)
