"""Compiler options: which GPU gets which, XLA_FLAGS take precedence, and each has a reason."""

import dataclasses

import pytest

from sharding import compiler_options
from sharding.compiler_options import (
    MEMORY_FOR_SPEED,
    OPTIONS,
    OVERLAP,
    SENDS_IN_FLIGHT,
    SEPARATE_PRODUCTS,
    as_dict,
    describe_options,
    flags_in,
    options_for,
)
from sharding.hardware import Hardware

CPU = Hardware(platform="cpu", device_kind="cpu")
V100 = Hardware(platform="gpu", device_kind="Tesla V100-SXM2-16GB", compute_capability=7.0)
H100 = Hardware(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability=9.0)


def names_for(hardware, *, is_described=False, saves_memory=True, **step):
    options = options_for(hardware, is_described=is_described, saves_memory=saves_memory, **step)
    return {option.name for option in options}


def test_cpus_have_no_options():
    assert options_for(CPU, is_described=False, saves_memory=False) == []
    assert describe_options([]) == "compiler  XLA's defaults"


def test_a_described_gpu_has_the_options_of_a_real_one_and_more(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    real = names_for(H100)
    described = names_for(H100, is_described=True)
    assert "xla_gpu_enable_triton_gemm" in real
    assert real < described
    assert "xla_gpu_collect_cost_model_stats" in described - real
    assert "xla_gpu_collect_cost_model_stats" not in names_for(V100, is_described=True)


def test_gpus_before_hopper_need_the_scheduler_that_later_ones_have_by_default(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    a100 = dataclasses.replace(V100, device_kind="NVIDIA A100-SXM4-80GB", compute_capability=8.0)
    name = "xla_gpu_enable_latency_hiding_scheduler"
    assert name in names_for(V100)
    assert name in names_for(a100)
    assert name not in names_for(H100)


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("xla_gpu_experimental_use_collective_kernels", {(0, 12, 0)}),
        ("xla_gpu_enable_dynamic_slice_fusion", {(0, 11, 0), (0, 11, 2)}),
    ],
)
def test_options_are_for_the_versions_of_jax_that_need_them(monkeypatch, name, versions):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for version in ((0, 10, 2), (0, 11, 0), (0, 11, 2), (0, 12, 0)):
        monkeypatch.setattr(compiler_options.jax, "__version_info__", version)
        assert (name in names_for(H100, is_described=True)) == (version in versions)


def test_xla_saves_memory_only_where_asked(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    names = names_for(H100, saves_memory=False) - names_for(H100)
    assert names == {option.name for option in MEMORY_FOR_SPEED}


def test_products_in_float8_stay_separate(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert names_for(H100, in_float8=True) - names_for(H100) == {SEPARATE_PRODUCTS.name}


def test_sends_between_stages_overlap_with_other_collectives(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert names_for(H100, has_stages=True) - names_for(H100) == {SENDS_IN_FLIGHT.name}


@pytest.mark.parametrize(("bytes_of_layer", "is_set"), [(0, False), (2**20, True), (2**27, False)])
def test_gradients_of_small_unrolled_layers_stay_apart(monkeypatch, bytes_of_layer, is_set):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    names = names_for(H100, bytes_of_layer=bytes_of_layer) - names_for(H100)
    assert names == ({"xla_gpu_reduce_scatter_combine_threshold_bytes"} if is_set else set())


def test_flags_of_the_user_take_precedence(monkeypatch, tmp_path):
    flags = "--xla_gpu_enable_triton_gemm --xla_disable_hlo_passes=fusion"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert names_for(H100, saves_memory=False) == {OVERLAP.name}
    assert names_for(H100, is_described=True) > {"xla_gpu_collect_cost_model_stats"}
    file = tmp_path / "flags.txt"
    file.write_text(flags.replace(" ", "\n"))
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert names_for(H100, saves_memory=False) == {OVERLAP.name}
    with pytest.raises(FileNotFoundError):
        flags_in(str(tmp_path / "missing.txt"))


def test_every_option_says_why():
    for option in (*OPTIONS, *MEMORY_FOR_SPEED, SENDS_IN_FLIGHT, SEPARATE_PRODUCTS):
        assert f"{option.name}={option.value}: {option.reason}" in describe_options([option])
        assert as_dict([option]) == {option.name: option.value}
        assert len(option.reason.split()) > 5
