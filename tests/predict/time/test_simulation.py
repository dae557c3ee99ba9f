"""Tests of predicted times: small programs whose time follows by arithmetic, without a compiler."""

import pytest

from predict.machines import machine
from tests.predict.time.programs import (
    GROUPS,
    US,
    computation,
    conditional,
    config,
    done,
    fusion,
    gather,
    loop,
    step,
)


def test_predict_multiplies_nested_loops():
    inner = computation("inner", fusion("f", 100, "inner.arg") + fusion("g", 50, "f"))
    outer = computation(
        "outer", loop("again", "inner", 4, operand="outer.arg") + fusion("h", 10, "again")
    )
    found = step(inner + outer, loop("first", "outer", 3) + fusion("last", 7, "first"))
    assert found.other_s == pytest.approx((3 * (4 * 150 + 10) + 7) * US)
    assert found.step_s == pytest.approx(found.other_s)


def test_predict_counts_an_open_ended_loop_once():
    found = step(computation("body", fusion("f", 100, "body.arg")), loop("w", "body", None))
    assert found.step_s == pytest.approx(100 * US)


def test_predict_hides_communication_behind_kernels():
    entry = gather("ag", 500) + fusion("f", 200) + fusion("g", 200) + done("ag") + fusion("h", 50)
    found = step("", entry)
    assert found.step_s == pytest.approx(550 * US)
    assert found.communication_s == pytest.approx(500 * US)
    assert found.exposed_communication_s == pytest.approx(100 * US)
    (row,) = found.collectives
    assert (row.kind, row.axes, row.count, row.bytes) == ("all-gather", ("fsdp",), 1, 160_000_000)
    assert row.is_async and row.is_overlapped


def test_predict_hides_communication_inside_each_iteration():
    body = gather("ag", 500, "body.arg") + fusion("f", 450, "body.arg") + done("ag")
    found = step(computation("body", body), loop("w", "body", 8, "layers"))
    assert found.step_s == pytest.approx(8 * 500 * US)
    assert found.exposed_communication_s == pytest.approx(8 * 50 * US)
    assert [(row.loop, row.count) for row in found.collectives] == [("layers", 8)]


def test_predict_queues_collectives_on_one_stream_and_permutations_on_another():
    permute = (
        "  %cp = (f32[75,1000,1000]{2,1,0}, f32[75,1000,1000]{2,1,0}) "
        f"collective-permute-start(%p), source_target_pairs={{{{0,1}}}}, {config(sol=1000)}\n"
    )
    entry = gather("one", 500) + gather("two", 500) + permute + fusion("f", 100)
    found = step("", entry + done("one") + done("two") + done("cp", "collective-permute-done"))
    # The two gathers run one after another and end at 1000 us. The permutation has its own stream,
    # and ends at 1000 us too.
    assert found.step_s == pytest.approx(1000 * US)
    assert found.communication_s == pytest.approx(2000 * US)


def test_predict_lets_a_loop_run_while_a_collective_does():
    body = computation("body", fusion("f", 100, "body.arg"))
    found = step(body, gather("ag", 600) + loop("w", "body", 4) + done("ag"))
    assert found.step_s == pytest.approx(600 * US)
    assert found.exposed_communication_s == pytest.approx(200 * US)


def test_predict_delays_a_loops_collectives_while_the_stream_is_busy():
    body = gather("inner", 400, "body.arg") + fusion("f", 400, "body.arg") + done("inner")
    entry = gather("ag", 600) + loop("w", "body", 3) + done("ag")
    found = step(computation("body", body), entry)
    # The first iteration's gather waits until 600 us and ends at 1000 us; the others are hidden.
    assert found.step_s == pytest.approx((1000 + 2 * 400) * US)
    assert found.exposed_communication_s == pytest.approx(600 * US)


def test_predict_exposes_work_that_precedes_on_the_same_stream():
    reduce = f"  %ar = f32[1]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add\n"
    body = computation("body", reduce.replace("ar =", "in =").replace("%p", "%body.arg"))
    found = step(body, gather("ag", 500) + reduce + loop("w", "body", 2) + done("ag"))
    latency = machine.COLLECTIVE_LATENCY_S
    # Kernels wait for the all-reduce, and therefore for the gather before it on the same stream.
    assert found.step_s == pytest.approx(500 * US + 3 * latency)
    exposed = {(row.kind, row.loop): row.exposed_s for row in found.collectives}
    assert exposed == pytest.approx(
        {
            ("all-gather", ""): 500 * US,
            ("all-reduce", ""): latency,
            ("all-reduce", "loop 1"): 2 * latency,
        }
    )
    inside = step(body, gather("ag", 500) + loop("w", "body", 2) + done("ag"))
    exposed = {row.kind: row.exposed_s for row in inside.collectives}
    assert exposed == pytest.approx({"all-gather": 500 * US, "all-reduce": 2 * latency})


def test_predict_exposes_synchronous_collectives():
    entry = (
        f"  %ar = f32[100,1000,1000]{{2,1,0}} all-reduce(%p), {GROUPS}, to_apply=%add, "
        f"{config(sol=2500)}\n"
    ) + fusion("f", 300)
    found = step("", entry)
    assert found.step_s == pytest.approx(2800 * US)
    assert found.exposed_communication_s == found.communication_s == pytest.approx(2500 * US)
    assert not found.collectives[0].is_async


def test_predict_waits_for_copies_from_the_host():
    entry = (
        "  %stack = f32[4,25,1000,1000]{3,2,1,0:S(5)} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        "  %ds = ((f32[4,25,1000,1000]{3,2,1,0:S(5)}, s32[]), f32[1,25,1000,1000]{3,2,1,0}, u32[])"
        " fusion-start(%stack, %i), kind=kLoop, calls=%none\n"
        + fusion("f", 700)
        + "  %got = f32[1,25,1000,1000]{3,2,1,0} fusion-done(%ds)\n"
        "  %dus = ((f32[4,25,1000,1000]{3,2,1,0:S(5)}, f32[1,25,1000,1000]{3,2,1,0}, s32[]), "
        "f32[4,25,1000,1000]{3,2,1,0:S(5)}, u32[]) fusion-start(%stack, %got, %i), kind=kLoop, "
        "calls=%none\n"
    )
    found = step("", entry)
    # 100 MB at 100 GB/s in each direction; only the end of the step waits for the second copy.
    assert found.host_s == pytest.approx(2000 * US)
    assert found.exposed_host_s == pytest.approx(1300 * US)
    assert found.step_s == pytest.approx(2000 * US)


def test_predict_takes_the_longer_branch():
    branches = computation("short", fusion("f", 10, "short.arg"))
    branches += computation("long", fusion("g", 30, "long.arg"))
    found = step(branches, conditional("c", ("short", "long"), "jit(step)/cond"))
    assert found.step_s == pytest.approx(30 * US)
