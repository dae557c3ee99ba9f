"""Unrolled layers, compiled for eight H100s: less time and memory than the loop, as estimated."""

import pytest

from benchmarks.harness.gpu_estimates import BOUNDS
from tests.gpu.steps import make_run
from train.compile import compile_run
from train.planning.compiled_step import CompiledStep

pytestmark = pytest.mark.gpu_compiler

_LLAMA = (
    "model.num_layers=8",
    "train.num_microbatches=1",
    "mesh.data=8",
    "memory.zero_stage=3",
    "data.global_batch_size=16",
    "data.sequence_length=4096",
    "precision.compute=bfloat16",
)


def compiled(*overrides: str) -> CompiledStep:
    return compile_run(make_run("llama:2-7b", (*_LLAMA, *overrides)))


def test_mesh_fsdp_alone_is_as_fast_as_the_best_settings():
    """As a newcomer types it: unrolled, and without rematerialization because all fits."""
    settings = [o for o in _LLAMA if not o.startswith(("mesh.", "memory."))]
    run = make_run("llama:2-7b", (*settings, "mesh.fsdp=8", "train.unroll=None"))
    assert run.unrolls and run.config.train.remat == "none"
    best = compiled("train.remat=none", "train.unroll=True")
    assert compile_run(run).prediction.step_s <= 1.01 * best.prediction.step_s


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("llama:2-7b", ()),
        ("llama:2-7b", ("train.remat=full",)),
        ("llama:2-7b", ("mesh.fsdp=4", "mesh.model=2")),
        ("llama:2-7b", ("mesh.fsdp=4", "mesh.pipeline=2", "train.num_microbatches=2")),
        ("llama:2-7b", ("memory.placement=host",)),
        ("llama:2-13b", ("train.remat=none",)),
        ("gpt2:medium", ("train.num_microbatches=1",)),
    ],
)
def test_layers_are_unrolled_by_default_where_it_pays(config, overrides):
    run = make_run(config, ("mesh.fsdp=8", "train.remat=none", "train.unroll=None", *overrides))
    assert run.unrolls == (not overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        # Gradients of several microbatches are added up in place.
        (
            "model.num_layers=16",
            "mesh.fsdp=8",
            "train.remat=none",
            "data.global_batch_size=32",
            "train.num_microbatches=2",
        ),
        # Several values of a barrier have the same shape, but are split differently.
        (
            "model.num_layers=8",
            "mesh.data=4",
            "mesh.model=2",
            "memory.zero_stage=1",
            "train.remat=dots",
            "data.global_batch_size=8",
            "train.num_microbatches=1",
        ),
    ],
)
@pytest.mark.drawn(1)
def test_unrolled_steps_take_the_memory_that_is_estimated(overrides):
    common = ("data.sequence_length=4096", "train.unroll=True")
    run = make_run("llama:3-8b", (*common, *overrides))
    low, high = BOUNDS
    compiled_bytes = compile_run(run).memory.in_all
    assert compiled_bytes is not None
    assert low <= run.estimate_memory().device_bytes / compiled_bytes <= high


@pytest.mark.drawn(1)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_unrolled_layers_take_less_time_and_no_more_memory(remat):
    in_loop = compiled(f"train.remat={remat}", "train.unroll=False")
    unrolled = compiled(f"train.remat={remat}", "train.unroll=True")
    if remat == "none":  # a layer that keeps only its input has little to copy
        assert unrolled.prediction.step_s < 0.99 * in_loop.prediction.step_s
    assert unrolled.memory.in_all is not None and in_loop.memory.in_all is not None
    # At most the gradients of one layer in float32 and the parameters of another are there longer.
    layer = 6 * (unrolled.run.num_params - 2 * 32000 * 4096) / 8
    assert unrolled.memory.in_all < in_loop.memory.in_all + layer
    low, high = BOUNDS
    estimated = unrolled.run.estimate_memory().device_bytes
    assert low <= estimated / unrolled.memory.in_all <= high


def test_layers_that_cannot_be_unrolled_are_refused():
    for overrides, reason in (
        (
            ("mesh.data=4", "mesh.pipeline=2", "train.num_microbatches=2"),
            "mesh.pipeline=2, pipeline.schedule=1f1b",
        ),
        (("memory.placement=host",), "memory.placement=host"),
        (("memory.offload_activations=('mlp',)",), r"memory.offload_activations=\('mlp',\)"),
    ):
        with pytest.raises(ValueError, match=f"train.unroll=True does not fit {reason}"):
            make_run("llama:2-7b", (*_LLAMA, *overrides, "train.unroll=True"))
