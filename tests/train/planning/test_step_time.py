"""Datasheet rates of the GPUs that a step can be compiled for."""

import pytest

from predict.machines.targets import TARGETS, parse_target
from train.planning.step_time import machine_of


@pytest.mark.parametrize("name", TARGETS)
def test_machine_of_knows_every_target(name):
    machine = machine_of(parse_target(f"{name}:2x4"))
    assert name.upper() in machine.device_kind
    assert machine.gpus_per_host == 4
    # The bandwidth in XLA's description of the GPU agrees within 5 %.
    described = parse_target(f"{name}:2x4").memory_bytes_per_s
    assert machine.memory_bytes_per_s == pytest.approx(described, rel=0.05)


def test_machine_of_uses_float32_for_gpus_without_bfloat16():
    volta, hopper = (machine_of(parse_target(f"{name}:1x8")) for name in ("v100", "h100"))
    assert volta.peak_flops_per_s("bf16") == volta.peak_flops_per_s("f32") == 15.7e12
    assert hopper.peak_flops_per_s("bf16") == 989.5e12
    assert hopper.peak_flops_per_s("f8e5m2") == hopper.peak_flops_per_s("f8e4m3fn") == 1979e12


@pytest.mark.parametrize(
    ("target", "network", "expected"),
    [("v100:2x8", None, 6.25e9), ("a100:2x8", None, 25e9), ("h100:2x8", None, 50e9)]
    + [("h100:2x8", 25.0, 3.125e9)],
)
def test_network_of_a_machine_is_as_in_its_usual_host_unless_given(target, network, expected):
    assert machine_of(parse_target(target, network)).network_bytes_per_s == expected


def test_gpus_of_a_v100_host_have_six_links_without_a_switch():
    links = machine_of(parse_target("v100:2x8")).links
    assert links is not None
    assert [sum(row) for row in links] == [6] * 8
    assert links == tuple(zip(*links, strict=True))
    # A host of 16 GPUs has a switch, as hosts of later GPUs do.
    assert machine_of(parse_target("v100:1x16")).links is None
    assert machine_of(parse_target("h100:1x8")).links is None
