"""Tests of the predicted time of a pipeline, tick by tick."""

import dataclasses

import pytest

from pipeline.runtime.tick_program import make_tick_program
from pipeline.schedule import make_schedule
from pipeline.stack_layout import cut
from predict.machines import machine
from predict.time.ticks import PADDING, Ticks, is_idle, num_layers
from sharding.ops.update_if import AT_MOST_ONCE
from tests.predict.time.programs import MACHINE, US, computation, fusion, loop, step


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


def test_ticks_of_program_list_the_operations_of_each_stage():
    program = make_tick_program(
        make_schedule("1f1b", num_stages=2, num_microbatches=3, num_chunks=1)
    )
    ticks = Ticks.of_program(program)
    # An iteration has the backwards of a tick and the forwards of the next: there is one more.
    assert len(ticks) == len(program.table.forward.microbatch) + 1
    assert all("F" not in cell for cell in ticks.stages[-1])
    first, last = zip(*ticks.stages, strict=True)
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


FORWARD = "pipeline_ticks/while/body/pipeline_F/at_most_once"
STACK = f"{FORWARD}/while/body/stack_encoder"


def test_predict_skips_the_layers_that_a_stage_does_not_have():
    layer = computation("layer", fusion("l", 100, "layer.arg"))
    padded = loop(
        "if_layer", "layer", None, f"{STACK}/layers/while/body/{AT_MOST_ONCE}", "body.arg"
    )
    body = computation("body", padded + fusion("count", 10, "if_layer"))
    layers = computation("forward", loop("layers", "body", 3, f"{STACK}/layers", "forward.arg"))
    tick = computation("tick", loop("F", "forward", None, FORWARD, "tick.arg"))
    entry = loop("ticks", "tick", 2, "pipeline_ticks")
    rows = ticks(("F F.encoder=3", "F F.encoder=1"), ("F F.encoder=3", ""))
    found = step(layer + body + layers + tick, entry, rows)
    assert found.step_s == pytest.approx(2 * 330 * US)
    rows = ticks(("", "F F.encoder=1"), ("F F.encoder=0", "F F.encoder=2"))
    found = step(layer + body + layers + tick, entry, rows)
    assert found.step_s == pytest.approx((130 + 230) * US)


def test_exchange_that_waits_takes_the_longest_forward_of_all_stages():
    layer = computation("layer", fusion("l", 100, "layer.arg"))
    bodies = ""
    for stack in ("encoder", "decoder"):
        scope = STACK.replace("encoder", stack)
        once = loop(f"{stack}.1", "layer", None, f"{scope}/{AT_MOST_ONCE}", f"{stack}.arg")
        bodies += computation(stack, once)
    both = loop("e", "encoder", 2, f"{STACK}/layers", "forward.arg")
    both += loop("d", "decoder", 2, f"{STACK.replace('encoder', 'decoder')}/layers", "e")
    permute = (
        "  %cp = f32[8]{0} collective-permute(%F), source_target_pairs={{0,4},{1,5},{2,6},{3,7}}\n"
    )
    tick = computation("tick", loop("F", "forward", None, FORWARD, "tick.arg") + permute)
    program = layer + bodies + computation("forward", both) + tick
    row = ("F F.encoder=2 F.decoder=0", "F F.encoder=0 F.decoder=1")
    found = step(program, loop("ticks", "tick", 1, "pipeline_ticks"), ticks(row))
    # 2 encoder layers on one stage while the other runs a decoder layer, not 3 layers.
    assert found.step_s == pytest.approx(200 * US + machine.NETWORK_LATENCY_S)


def test_ticks_of_program_count_the_layers_of_chunks_that_differ():
    schedule = make_schedule("1f1b", num_stages=2, num_microbatches=2, num_chunks=1)
    layouts = cut({"encoder": 2, "decoder": 4}, schedule.placement, (3, 3))
    ticks = Ticks.of_program(make_tick_program(schedule), layouts)
    first, last = (frozenset().union(*stage) for stage in zip(*ticks.stages, strict=True))
    assert {"B.encoder=2", "B.encoder.first", "B.decoder=1", "B.decoder.first"} < first
    assert {"B.encoder=0", "B.decoder=3"} < last and "B.decoder.first" not in last
    even = cut({"encoder": 2, "decoder": 2}, schedule.placement, (2, 2))
    for name in ("decoder", "encoder"):
        same = Ticks.of_program(make_tick_program(schedule), {name: even[name]})
        assert any(f"B.{name}=2" in cell for stages in same.stages for cell in stages)
    alike = cut({"blocks": 4}, schedule.placement, (2, 2))
    assert Ticks.of_program(make_tick_program(schedule), alike) == Ticks.of_program(
        make_tick_program(schedule)
    )


@pytest.mark.parametrize(
    ("path", "operations", "skips"),
    [
        ("pipeline_F", "B", True),
        ("pipeline_F", "F", False),
        (STACK, "F F.encoder=0", True),
        (STACK, "F F.encoder=2 F.decoder=0", False),
        (STACK, "F", False),
        (f"{STACK}/before", "F F.encoder=2", True),
        (f"{STACK}/before", "F F.encoder=2 F.encoder.first", False),
        (f"{STACK}/before", "F", False),
        (f"{STACK}/layers/while/body", f"F F.encoder=2 {PADDING}", True),
        (f"{STACK}/layers/while/body", "F F.encoder=2", False),
        (f"{STACK}/layers/while/body", "F F.encoder=0", True),
        ("scan", "F", False),
    ],
)
def test_is_idle_reads_what_a_loop_belongs_to(path: str, operations: str, skips: bool):
    assert is_idle(f"{path}/{AT_MOST_ONCE}/while", frozenset(operations.split())) == skips


def test_num_layers_is_known_only_if_chunks_differ():
    path = f"{STACK}/layers/while"
    assert num_layers(path, frozenset({"F", "F.encoder=2", "B.encoder=9"})) == 2
    assert num_layers(path, frozenset({"F", "F.decoder=1"})) is None
