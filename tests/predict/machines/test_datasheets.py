"""Datasheet rates of the GPUs that a step can be compiled for."""

import jax.numpy as jnp
import pytest

from predict.machines.datasheets import datasheet_machine, machine_of, peak_flops_per_s
from predict.machines.targets import TARGETS, parse_target


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


@pytest.mark.parametrize(
    "kind, dtype, tflops_per_s",
    [
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, 312),
        ("NVIDIA A100-SXM4-80GB", jnp.float32, 156),
        ("NVIDIA A100-SXM4-80GB", jnp.float64, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", jnp.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 989.5),
        ("NVIDIA H100 PCIe", jnp.bfloat16, 756),
        ("NVIDIA H200", jnp.float32, 494.5),
        ("NVIDIA B200", jnp.bfloat16, 2250),
        ("NVIDIA L4", jnp.bfloat16, 121),
        ("NVIDIA L40S", jnp.bfloat16, 362),
        ("NVIDIA L40", jnp.bfloat16, None),
        ("Tesla V100-SXM2-16GB", jnp.float16, 125),
        ("Tesla V100-SXM2-16GB", jnp.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", jnp.bfloat16, 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", jnp.bfloat16, None),
        ("AMD Instinct MI300X", jnp.bfloat16, 1307.4),
        ("NVIDIA H100 80GB HBM3", jnp.float8_e4m3fn, 1979),
        ("NVIDIA H100 80GB HBM3", jnp.float8_e5m2, 1979),
        ("NVIDIA A100-SXM4-80GB", jnp.float8_e4m3fn, None),
        ("TPU v4", jnp.bfloat16, 275),
        ("TPU v5 lite", jnp.bfloat16, 197),
        ("TPU v5e", jnp.bfloat16, 197),
        ("TPU v5p", jnp.bfloat16, 459),
        ("TPU v5", jnp.bfloat16, 459),
        ("TPU v6 lite", jnp.bfloat16, 918),
        ("TPU v6e", jnp.float32, None),
        ("cpu", jnp.float32, None),
    ],
)
def test_peak_flops_of_a_device_kind(kind, dtype, tflops_per_s):
    peak = peak_flops_per_s(kind, dtype)
    assert peak == (None if tflops_per_s is None else tflops_per_s * 1e12)


@pytest.mark.parametrize(
    ("kind", "gb_per_s"), [("NVIDIA GH200 480GB", 4000), ("NVIDIA GH200 144G HBM3e", 4900)]
)
def test_gh200_has_its_own_memory_and_a_fast_link_to_the_host(kind, gb_per_s):
    machine = datasheet_machine(kind, 1)
    assert machine.device_kind == kind
    assert machine.peak_flops_per_s("bf16") == 989.5e12
    assert machine.memory_bytes_per_s == gb_per_s * 1e9
    assert machine.host_bytes_per_s == 450e9


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("cpu", "float64"), ("TPU v4", "bfloat16"), ("Tesla V100-SXM2-32GB", "bfloat16")],
)
def test_devices_of_unknown_rates_count_as_an_a100(kind, dtype):
    assert datasheet_machine(kind, 8, dtype=dtype).device_kind == "NVIDIA A100-SXM4-80GB"
