"""Tests of predicted times: small programs whose time follows by arithmetic, without a compiler."""

import json

import pytest

from sharding.analysis import hlo, kernel_time
from sharding.analysis.cost import format_prediction, predict
from sharding.analysis.kernel_time import attention_flops, moved_bytes
from sharding.analysis.simulation import Ticks
from sharding.pipeline.runtime.buffers import make_execution_plan
from sharding.pipeline.schedule import make_schedule
from tests.sharding.analysis.programs import (
    GATHERED,
    GROUPS,
    MACHINE,
    MESH,
    computation,
    conditional,
    config,
    done,
    fusion,
    gather,
    loop,
    module,
)

US = 1e-6


def step(computations: str, entry: str, ticks: Ticks | None = None):
    found = predict(module(computations, entry), MESH, MACHINE, ticks)
    # Relations that hold for every prediction.
    exposed = found.exposed_communication_s + found.exposed_host_s
    kernels = found.matmul_s + found.attention_s + found.other_s
    assert found.step_s == pytest.approx(kernels + exposed + found.bubble_s)
    assert 0 <= found.exposed_communication_s <= found.communication_s + 1e-12
    assert 0 <= found.exposed_host_s <= found.host_s + 1e-12
    return found


def product(name: str, m: int, n: int, k: int, *, out: str = "bf16", sol: float | None) -> str:
    cost = config() if sol is None else config(sol=sol)
    dims = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
    cost = cost.replace("={", f'={{"gemm_backend_config":{{{dims}}},', 1)
    return (
        f"  %{name}.a = bf16[{m},{k}]{{1,0}} bitcast(%p)\n"
        f"  %{name}.b = bf16[{k},{n}]{{1,0}} bitcast(%p)\n"
        f"  %{name} = ({out}[{m},{n}]{{1,0}}, s8[4194304]{{0}}) custom-call(%{name}.a, %{name}.b), "
        f'custom_call_target="__cublas$lt$matmul", {cost}\n'
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


def test_predict_gives_a_kernel_its_least_time():
    assert step("", fusion("f", 0.001)).step_s == kernel_time.KERNEL_S


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


def test_predict_exposes_what_a_stream_does_first():
    reduce = f"  %ar = f32[1]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add\n"
    body = computation("body", reduce.replace("ar =", "in =").replace("%p", "%body.arg"))
    found = step(body, gather("ag", 500) + reduce + loop("w", "body", 2) + done("ag"))
    latency = kernel_time.COLLECTIVE_LATENCY_S
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


def test_predict_prices_collectives_without_an_entry_by_their_bytes():
    wrapped = computation(
        "wrapped",
        f"  ROOT %rs = f32[25,1000,1000]{{2,1,0}} reduce-scatter(%wrapped.arg), {GROUPS}, "
        "to_apply=%add, dimensions={0}",
    )
    entry = (
        "  %start = ((f32[100,1000,1000]{2,1,0}), f32[25,1000,1000]{2,1,0}, u32[]) "
        "async-start(%p), calls=%wrapped\n"
    )
    found = step(wrapped, entry + fusion("f", 600) + done("start", "async-done"))
    # 3 × 100 MB at 300 GB/s.
    assert found.communication_s == pytest.approx(1000 * US)
    assert found.exposed_communication_s == pytest.approx(400 * US)
    (row,) = found.collectives
    assert row.kind == "reduce-scatter" and row.is_async and row.is_overlapped


@pytest.mark.parametrize(
    "given, expected",
    [(500, 500), (1, 300), (1e6, 800)],  # at least 300 us, at most 2 × 400 us
)
def test_predict_bounds_what_xla_says_of_collectives(given, expected):
    found = step("", gather("ag", given) + done("ag"))
    assert found.step_s == pytest.approx(expected * US)


def test_predict_takes_the_network_between_hosts():
    across = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    entry = f"  %ar = f32[85,1000,1000]{{2,1,0}} all-reduce(%p), {across}, to_apply=%add\n"
    # Each group has one adapter: 2 × 1/2 × 340 MB at 85 GB/s.
    assert step("", entry).step_s == pytest.approx(4000 * US)
    together = f"  %ar = f32[85,1000,1000]{{2,1,0}} all-reduce(%p), {GROUPS}, to_apply=%add\n"
    assert step("", together).step_s == pytest.approx(1.5 * 340e6 / 300e9)


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


def pipeline(permute: str = "") -> tuple[str, str]:
    """A loop over ticks: F takes 100 us, B 200 us, other work 10 us, and the head in B 50 us."""
    path = "jit(step)/pipeline_ticks/while/body/closed_call"
    branches = computation("idle", "  %nothing = f32[8]{0} bitcast(%idle.arg)")
    branches += computation("forward", fusion("f", 100, "forward.arg"))
    branches += computation("head", fusion("h", 50, "head.arg"))
    branches += computation(
        "backward",
        conditional(
            "is_last",
            ("idle", "head"),
            f"{path}/pipeline_B/cond/branch_1_fun/pipeline_B.is_last/cond",
            "backward.arg",
        )
        + fusion("b", 200, "is_last"),
    )
    tick = (
        conditional("F", ("idle", "forward"), f"{path}/pipeline_F/cond", "tick.arg")
        + permute
        + conditional("B", ("idle", "backward"), f"{path}/pipeline_B/cond", "tick.arg")
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


def test_predict_adds_a_ticks_operations_where_an_exchange_waits():
    permute = (
        "  %cp = f32[8]{0} collective-permute(%F), source_target_pairs={{0,4},{1,5},{2,6},{3,7}}\n"
    )
    found = step(*pipeline(permute), ROWS)
    wait = kernel_time.NETWORK_LATENCY_S
    assert found.step_s == pytest.approx((110 + 360 + 260) * US + 3 * wait)
    assert found.bubble_s == pytest.approx((100 + 100) * US)


def test_predict_without_ticks_runs_everything_in_every_tick():
    assert step(*pipeline()).step_s == pytest.approx(3 * 360 * US)


def test_ticks_of_plan_say_what_each_stage_runs():
    plan = make_execution_plan(
        make_schedule("1f1b", num_stages=2, num_microbatches=3, num_chunks=1)
    )
    found = Ticks.of_plan(plan)
    assert len(found) == len(plan.tables["F.microbatch"])
    first, last = zip(*found.stages, strict=True)
    assert sum("F" in cell for cell in first) == sum("B" in cell for cell in first) == 3
    assert all(("B" in cell) == ("B.is_first" in cell) for cell in first)
    # The last stage computes its forwards as part of its backwards.
    assert sum("B.is_last" in cell for cell in last) == 3 and not any("F" in cell for cell in last)


@pytest.mark.parametrize("sol, expected", [(4.0e3, 4.0e3), (None, None), (5e6, None), (1e3, 2e3)])
def test_predict_replaces_absurd_times_of_products(sol, expected):
    # 2 TFLOP take 2 ms at the peak rate, and usually 2 ms / 0.7.
    found = step("", product("gemm", 10_000, 10_000, 10_000, sol=sol))
    expected = 2e3 / kernel_time.MATMUL_EFFICIENCY if expected is None else expected
    assert found.matmul_s == found.step_s == pytest.approx(expected * US)


def test_predict_prices_products_with_large_results_by_their_bytes():
    # 512 × 32000 × 8: 0.26 GFLOP and 65.5 MB of output, for which XLA's entry is 11 ms.
    found = step("", product("gemm", 512, 32_000, 8, out="f32", sol=11_424))
    moved = 2 * (512 * 8 + 8 * 32_000) + 4 * 512 * 32_000
    assert found.matmul_s == pytest.approx(moved / 1e12 / kernel_time.MEMORY_EFFICIENCY)


def test_predict_reads_the_entry_that_fits_a_fusion():
    triton = (
        "  %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%none, "
        'backend_config={"fusion_backend_config":{"kind":"__triton"},"reification_cost":['
        '{"exec_time_us":83374.9,"compute_time_us":1.5e2,"name":""},'
        '{"exec_time_us":40.861,"memory_access_time_us":40.29,"name":"indexing-cost-model"},'
        '{"exec_time_us":0.01,"name":"sol"}]}\n'
    )
    assert step("", triton).step_s == pytest.approx(40.861 * US)


def attention(mask: str, window: int, *, backward: bool = False) -> hlo.Instruction:
    shape = "bf16[2,1000,8,64]{3,2,1,0}"
    target = "__cudnn$fmhaSoftmaxBackward" if backward else "__cudnn$fmhaSoftmax"
    entry = (
        f"  %q = {shape} parameter(1)\n  %k = bf16[2,1000,2,64]{{3,2,1,0}} parameter(2)\n"
        f"  %v = bf16[2,1000,2,64]{{3,2,1,0}} parameter(3)\n"
        f"  %a = ({shape}, u8[0]{{0}}) custom-call(%q, %k, %v), "
        f'custom_call_target="{target}", backend_config={{"cudnn_fmha_backend_config": '
        '{"intermediate_tensor_shape": {"element_type": "BF16", '
        '"dimensions": ["2", "8", "1000", "1000"], "tuple_shapes": []}, '
        f'"mask_type": "{mask}", "sliding_window_length": {window}}}}}\n'
    )
    (parsed,) = hlo.parse_modules(module("", entry))
    return parsed.computations["main"][-1]


def test_attention_flops_count_the_pairs_that_the_mask_shows():
    per_pair = 2 * 2 * 8 * (64 + 64)
    assert attention_flops(attention("NO_MASK", 0)) == per_pair * 1000 * 1000
    assert attention_flops(attention("CAUSAL", 0)) == per_pair * 1000 * 1001 // 2
    assert attention_flops(attention("PADDING_CAUSAL", 0)) == per_pair * 1000 * 1001 // 2
    windowed = sum(min(t + 1, 256) for t in range(1000))
    assert attention_flops(attention("CAUSAL", 256)) == per_pair * windowed
    backward = attention_flops(attention("NO_MASK", 0, backward=True))
    assert backward == 5 * per_pair * 1000 * 1000 // 2


def test_moved_bytes_of_slices_and_updates_are_those_of_the_part():
    fused = (
        "%fused (a: f32[32,1000], b: f32[32,1000], i: s32[]) -> f32[32,1000] {\n"
        "  %a = f32[32,1000]{1,0} parameter(0)\n  %b = f32[32,1000]{1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n  %zero = s32[] constant(0)\n"
        "  %part = f32[1,1000]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,1000}\n"
        "  ROOT %new = f32[32,1000]{1,0} dynamic-update-slice(%b, %part, %i, %zero)\n}\n\n"
    )
    entry = (
        "  %x = f32[32,1000]{1,0} parameter(1)\n  %i.1 = s32[] parameter(2)\n"
        "  %f = f32[32,1000]{1,0} fusion(%x, %x, %i.1), kind=kLoop, calls=%fused\n"
        "  %s = ((f32[32,1000]{1,0}, s32[]), f32[32,1000]{1,0}, u32[]) "
        "fusion-start(%x, %x, %i.1), kind=kLoop, calls=%fused\n"
        f"  %c = {GATHERED} copy(%p)\n"
    )
    (parsed,) = hlo.parse_modules(module(fused, entry))
    *_, update, start, copy = parsed.computations["main"]
    assert moved_bytes(parsed, update) == 2 * 4000 + 4  # reads and writes a row, reads the index
    assert moved_bytes(parsed, start) == 2 * 4000 + 4
    assert moved_bytes(parsed, copy) == 160_000_000 + 32


def test_prediction_as_text_and_json():
    found = step("", gather("ag", 500) + fusion("f", 200) + done("ag") + fusion("g", 500))
    parsed = json.loads(json.dumps(found.to_json()))
    assert parsed["step_s"] == pytest.approx(1e-3)
    assert parsed["collectives"][0]["kind"] == "all-gather"
    lines = format_prediction(found).splitlines()
    assert lines[-1].split()[:3] == ["all-gather", "fsdp", "-"]
    assert "step                          1.00  100.0%" in lines
    assert format_prediction(step("", fusion("f", 5))).endswith("no collectives")
