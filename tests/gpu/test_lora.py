"""Adapters of a LLaMA-3-70B on 8 H100s, which could not hold its optimizer state."""

import pytest

from sharding.analysis.communication import collectives
from tests.gpu import steps
from train.reporting.compiled_step import compile_and_predict

pytestmark = pytest.mark.gpu_compiler

_SHARED = (
    "data.global_batch_size=8",
    "data.sequence_length=4096",
    "precision.compute=bfloat16",
    "precision.frozen=bfloat16",
    "train.remat=full",
    "lora.rank=16",
)
_MODEL = ("mesh.model=8", "train.num_microbatches=8")
#: The same as for other steps of published sizes.
_BOUNDS = (0.9, 1.1)


@pytest.mark.parametrize("variant", [(), ("lora.use_dora=true",)], ids=["LoRA", "DoRA"])
def test_adapters_of_a_70b_fit_on_8_gpus_and_leave_its_collectives(variant):
    run = steps.make_run("llama:3-70b", (*_SHARED, *_MODEL, *variant))
    assert 0.996 < run.num_frozen / run.num_params < 1
    compiled = steps.compiled_bytes(run)
    assert compiled < 25 * 2**30
    assert _BOUNDS[0] < run.estimate_memory().device_bytes / compiled < _BOUNDS[1]
    found = [c for c in collectives(run.compile_train_step(), run.mesh) if c.loop == "layers"]
    sums = {kind: sum(c.bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}}
    # The sums of branches stay reduce-scatters: those of adapters are narrow.
    tokens_bytes = 8 * 4096 * 8192 * 2 * 80
    assert sums["all-reduce"] < 0.1 * tokens_bytes
    assert sums["all-gather"] < 7 * tokens_bytes
