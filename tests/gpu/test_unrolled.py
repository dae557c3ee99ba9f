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
