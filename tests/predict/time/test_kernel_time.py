"""Tests of the times of single instructions, which follow from their bytes and FLOPs."""

import dataclasses

import pytest

from predict.machines import machine
from predict.program.instruction_work import ATTENTION_TILE, AttentionWork
from predict.time import kernel_time
from tests.predict.time.programs import (
    GROUPS,
    MACHINE,
    US,
    computation,
    config,
    done,
    fusion,
    gather,
    step,
)


def test_predict_gives_a_kernel_its_least_time():
    assert step("", fusion("f", 0.001)).step_s == machine.KERNEL_S


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
def test_predict_bounds_xlas_estimates_of_collectives(given, expected):
    found = step("", gather("ag", given) + done("ag"))
    assert found.step_s == pytest.approx(expected * US)


def test_predict_takes_the_network_between_hosts():
    across = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    entry = f"  %ar = f32[85,1000,1000]{{2,1,0}} all-reduce(%p), {across}, to_apply=%add\n"
    # Each group has one adapter: 2 × 1/2 × 340 MB at 85 GB/s.
    assert step("", entry).step_s == pytest.approx(4000 * US)
    together = f"  %ar = f32[85,1000,1000]{{2,1,0}} all-reduce(%p), {GROUPS}, to_apply=%add\n"
    assert step("", together).step_s == pytest.approx(1.5 * 340e6 / 300e9)


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


@pytest.mark.parametrize("sol, expected", [(4.0e3, 4.0e3), (None, None), (5e6, None), (1e3, None)])
def test_predict_replaces_absurd_times_of_products(sol, expected):
    # 2 TFLOP take 2 ms at the peak rate, and usually 2 ms / 0.7.
    found = step("", product("gemm", 10_000, 10_000, 10_000, sol=sol))
    expected = 2e3 / machine.MATMUL_EFFICIENCY if expected is None else expected
    assert found.matmul_s == found.step_s == pytest.approx(expected * US)


def test_predict_prices_products_with_large_results_by_their_bytes():
    # 512 × 32000 × 8: 0.26 GFLOP and 65.5 MB of output, for which XLA's entry is 11 ms.
    found = step("", product("gemm", 512, 32_000, 8, out="f32", sol=11_424))
    moved = 2 * (512 * 8 + 8 * 32_000) + 4 * 512 * 32_000
    assert found.matmul_s == pytest.approx(moved / 1e12 / machine.MEMORY_EFFICIENCY)


def test_predict_adds_flops_and_bytes_of_products_on_shared_cores():
    shared = dataclasses.replace(MACHINE, shares_cores=True)
    program = product("gemm", 512, 32_000, 8, out="f32", sol=None)
    found = step("", program, machine=shared)
    moved = 2 * (512 * 8 + 8 * 32_000) + 4 * 512 * 32_000
    moved_s = moved / MACHINE.memory_bytes_per_s / machine.MEMORY_EFFICIENCY
    flops_s = 2 * 512 * 32_000 * 8 / MACHINE.flops_per_s["bf16"] / machine.MATMUL_EFFICIENCY
    assert found.matmul_s == pytest.approx(moved_s + flops_s)


def test_predict_reads_the_entry_that_fits_a_fusion():
    triton = (
        "  %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%none, "
        'backend_config={"fusion_backend_config":{"kind":"__triton"},"reification_cost":['
        '{"exec_time_us":83374.9,"compute_time_us":1.5e2,"name":""},'
        '{"exec_time_us":40.861,"memory_access_time_us":40.29,"name":"indexing-cost-model"},'
        '{"exec_time_us":0.01,"name":"sol"}]}\n'
    )
    assert step("", triton).step_s == pytest.approx(40.861 * US)


def test_predict_limits_the_rate_of_triton_fusions(monkeypatch):
    text = (
        "  %f = f32[1000,1000]{1,0} fusion(%p), kind=kCustom, calls=%none, "
        'backend_config={"fusion_backend_config":{"kind":"__triton"},"reification_cost":['
        '{"exec_time_us":3.0,"memory_access_time_us":3.0,"name":"indexing-cost-model"}]}\n'
    )
    monkeypatch.setattr(kernel_time, "TRITON_BYTES_PER_S", 1e11)
    assert step("", text).step_s == pytest.approx(40 * US, rel=1e-3)


#: batch, heads, tokens, head dim, whether causal, and milliseconds forward and backward of one
#: layer on an H200, whose peak is 989 TFLOP/s: the steps of benchmarks/results/gpu_steps.json.
MEASURED = [
    (16, 25, 1024, 64, True, 0.180, 0.610),
    (32, 25, 1024, 64, True, 0.373, 1.213),
    (8, 32, 4096, 64, True, 1.512, 4.431),
    (4, 24, 4096, 128, True, 0.856, 2.620),
    (256, 16, 197, 64, False, 0.244, 0.829),
]


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "head_dim", "causal", "forward_ms", "backward_ms"), MEASURED
)
def test_cost_of_attention_is_close_to_measured_kernels(
    batch, heads, tokens, head_dim, causal, forward_ms, backward_ms
):
    side = -(-tokens // ATTENTION_TILE)
    tiles = side * (side + 1) // 2 if causal else side**2
    work = AttentionWork(
        num_queries=batch * heads * tokens,
        num_pairs=batch * heads * tiles * ATTENTION_TILE**2,
        head_dim=head_dim,
    )
    for cost, milliseconds in (
        (kernel_time.ATTENTION_FORWARD, forward_ms),
        (kernel_time.ATTENTION_BACKWARD, backward_ms),
    ):
        assert cost.flops(work) / 989e12 == pytest.approx(1e-3 * milliseconds, rel=0.1)
