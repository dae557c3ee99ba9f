"""Text of small GPU programs, and a machine with round rates, for tests of predicted times."""

import json

import pytest

from predict.machines.machine import Machine
from predict.time.prediction import Prediction, predict
from predict.time.ticks import Ticks

#: 4 GPUs per host. A reduce-scatter over 4 GPUs moves 3 × its output, over links of 300 GB/s.
MACHINE = Machine(
    device_kind="test",
    flops_per_s={"f32": 0.5e15, "bf16": 1e15},
    memory_bytes_per_s=1e12,
    host_bytes_per_s=125e9,  # 100 GB/s with HOST_EFFICIENCY
    link_bytes_per_s=400e9,  # 300 GB/s with LINK_EFFICIENCY
    gpus_per_host=4,
    network_bytes_per_s=100e9,  # 85 GB/s with NETWORK_EFFICIENCY
)
MESH = {"pipeline": 2, "fsdp": 4}
US = 1e-6
#: Groups of 4 GPUs, each group on one host.
GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
#: Output of an all-gather over GROUPS that takes 400 us on the links, or 300 us at full bandwidth.
GATHERED = "f32[40,1000,1000]{2,1,0}"


def module(computations: str, entry: str) -> str:
    """Return the text of a program for 8 devices."""
    return (
        "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
        "%add (x: f32[], y: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%x, %y)\n}\n\n"
        f"{computations}\n"
        f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{entry}\n}}\n"
    )


def computation(name: str, body: str) -> str:
    """Return a computation with one argument, which is named after it."""
    return (
        f"%{name} ({name}.arg: f32[8]) -> f32[8] {{\n"
        f"  %{name}.arg = f32[8]{{0}} parameter(0)\n{body}\n}}\n\n"
    )


def config(**microseconds: float) -> str:
    """Return a backend_config with XLA's estimates; `unnamed` is the entry without a name."""
    cost = [
        {"exec_time_us": time, "compute_time_us": 0, "name": name.replace("unnamed", "")}
        for name, time in microseconds.items()
    ]
    text = json.dumps({"reification_cost": cost}, separators=(",", ":"))
    return f"backend_config={text}"


def fusion(name: str, microseconds: float, operand: str = "p") -> str:
    """Return a fusion that takes this long."""
    return (
        f"  %{name} = f32[8]{{0}} fusion(%{operand}), kind=kLoop, calls=%none, "
        f"{config(unnamed=microseconds)}\n"
    )


def gather(name: str, microseconds: float, operand: str = "p") -> str:
    """Return the start of an all-gather."""
    return (
        f"  %{name} = (f32[10,1000,1000]{{2,1,0}}, {GATHERED}) all-gather-start(%{operand}), "
        f"{GROUPS}, dimensions={{0}}, {config(sol=microseconds)}\n"
    )


def done(start: str, opcode: str = "all-gather-done") -> str:
    """Return the done of a start."""
    return f"  %{start}.done = {GATHERED} {opcode}(%{start})\n"


def loop(name: str, body: str, trips: int | None, scope: str = "", operand: str = "p") -> str:
    """Return a loop over a computation; with trips=None its trip count is unknown to XLA.

    With the scope AT_MOST_ONCE, it is a branch.
    """
    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return (
        f"  %{name} = f32[8]{{0}} while(%{operand}), condition=%none, body=%{body}, "
        f'metadata={{op_name="jit(step)/{scope}/while"}}{known}\n'
    )


def conditional(name: str, branches: tuple[str, str], op_name: str, operand: str = "p") -> str:
    """Return a conditional with two branches."""
    called = ", ".join(f"%{branch}" for branch in branches)
    return (
        f"  %{name} = f32[8]{{0}} conditional(%{operand}, %{operand}, %{operand}), "
        f'branch_computations={{{called}}}, metadata={{op_name="{op_name}"}}\n'
    )


def step(
    computations: str, entry: str, ticks: Ticks | None = None, machine: Machine = MACHINE
) -> Prediction:
    """Predict a program, and check the relations that hold for every prediction."""
    found = predict(module(computations, entry), MESH, machine, ticks)
    exposed = found.exposed_communication_s + found.exposed_host_s
    kernels = found.matmul_s + found.attention_s + found.other_s
    assert found.step_s == pytest.approx(kernels + exposed + found.bubble_s)
    assert 0 <= found.exposed_communication_s <= found.communication_s + 1e-12
    assert 0 <= found.exposed_host_s <= found.host_s + 1e-12
    return found
