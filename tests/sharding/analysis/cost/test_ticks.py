"""Tests of the predicted time of a pipeline, tick by tick."""

import dataclasses

import pytest

from sharding.analysis.cost import machine
from sharding.analysis.cost.ticks import Ticks
from sharding.ops.update_if import AT_MOST_ONCE
from sharding.pipeline.runtime.execution_plan import make_execution_plan
from sharding.pipeline.schedule import make_schedule
from tests.sharding.analysis.cost.programs import MACHINE, US, computation, fusion, loop, step


def pipeline(permute: str = "") -> tuple[str, str]:
    """A loop over ticks: F takes 100 us, B 200 us, other work 10 us, and the head in B 50 us."""
    path = "pipeline_ticks/while/body"

    def at_most_once(operation: str, body: str, operand: str) -> str:
        scope = f"{path}/pipeline_{operation}/{AT_MOST_ONCE}"
        return loop(operation, body, None, scope, operand)

    branches = computation("forward", fusion("f", 100, "forward.arg"))
    branches += computation("head", fusion("h", 50, "head.arg"))
    branches += computation(
        "backward",
        at_most_once("B.is_last", "head", "backward.arg") + fusion("b", 200, "B.is_last"),
    )
    tick = (
        at_most_once("F", "forward", "tick.arg")
        + permute
        + at_most_once("B", "backward", "tick.arg")
        + fusion("rest", 10, "B")
    )
    return branches + computation("tick", tick), loop("ticks", "tick", 3, "pipeline_ticks")


def ticks(*rows: tuple[str, str]) -> Ticks:
    return Ticks(stages=tuple(tuple(frozenset(s.split()) for s in row) for row in rows))


ROWS = ticks(("F", ""), ("F", "B B.is_last"), ("B", "B B.is_last"))


def test_predict_runs_a_tick_as_long_as_its_slowest_stage():
    found = step(*pipeline(), ROWS)
    assert found.step_s == pytest.approx((110 + 260 + 260) * US)
    # The second stage is the busiest one; it only waits in the first tick.
    assert found.other_s == pytest.approx((10 + 260 + 260) * US)
    assert found.bubble_s == pytest.approx(100 * US)


def test_predict_adds_the_operations_of_a_tick_if_an_exchange_waits():
    permute = (
        "  %cp = f32[8]{0} collective-permute(%F), source_target_pairs={{0,4},{1,5},{2,6},{3,7}}\n"
    )
    found = step(*pipeline(permute), ROWS)
    wait = machine.NETWORK_LATENCY_S
    assert found.step_s == pytest.approx((110 + 360 + 260) * US + 3 * wait)
    assert found.bubble_s == pytest.approx((100 + 100) * US)


def test_predict_without_ticks_runs_everything_in_every_tick():
    assert step(*pipeline()).step_s == pytest.approx(3 * 360 * US)


def test_ticks_of_plan_list_the_operations_of_each_stage():
    plan = make_execution_plan(
        make_schedule("1f1b", num_stages=2, num_microbatches=3, num_chunks=1)
    )
    found = Ticks.of_plan(plan)
    # An iteration has the backwards of a tick and the forwards of the next: there is one more.
    assert len(found) == len(plan.table.forward.microbatch) + 1
    assert all("F" not in cell for cell in found.stages[-1])
    first, last = zip(*found.stages, strict=True)
    assert sum("F" in cell for cell in first) == sum("B" in cell for cell in first) == 3
    assert all(("B" in cell) == ("B.is_first" in cell) for cell in first)
    # The last stage computes its forwards as part of its backwards.
    assert sum("B.is_last" in cell for cell in last) == 3 and not any("F" in cell for cell in last)


def test_predict_has_no_bubble_on_stages_that_share_their_cores():
    found = step(*pipeline(), ROWS, machine=dataclasses.replace(MACHINE, shares_cores=True))
    first = (110 + 110 + 260) * US
    second = (10 + 260 + 210) * US
    assert found.step_s == pytest.approx((first + second) / 2)
    assert found.bubble_s == 0
