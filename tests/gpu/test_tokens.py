"""Steps that split their tokens over `model` between the branches of a block, for H100s."""

import pytest

from benchmarks.harness.gpu_estimates import SMALL_BOUNDS
from predict.program.communication import collectives
from tests.gpu import steps

pytestmark = pytest.mark.gpu_compiler

_MODEL = ("mesh.model=2", "data.sequence_length=512", "data.global_batch_size=8")
_WHOLE = (*_MODEL, "rules.act_tokens=none")


def kinds_over_model(run) -> set[str]:
    """Return the kinds of collectives over `model` in the loops over layers."""
    found = collectives(run.compile_train_step(), run.mesh)
    large = (each for each in found if each.bytes > 2**16)  # not the gradients of norms
    return {each.kind for each in large if each.axes == ("model",) and each.loop == "layers"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("config", ["gpt2", "llama"])
def test_sums_of_branches_become_reduce_scatters_and_the_step_needs_less_memory(config):
    # With fewer layers, the gathered tokens of one layer outweigh the saved activations of all.
    sizes = ("data.tokenizer=bytes", "precision.compute=bfloat16", "model.num_layers=16")
    whole = steps.make_run(config, (*sizes, *_WHOLE))
    split = steps.make_run(config, (*sizes, *_MODEL))
    assert kinds_over_model(whole) == {"all-reduce"}
    assert kinds_over_model(split) == {"all-gather", "reduce-scatter"}
    assert steps.compiled_bytes(split) < steps.compiled_bytes(whole)
    low, high = SMALL_BOUNDS
    assert low < split.estimate_memory().device_bytes / steps.compiled_bytes(split) < high


_ADAPTERS = (
    "data.global_batch_size=8",
    "data.sequence_length=4096",
    "precision.compute=bfloat16",
    "precision.frozen=bfloat16",
    "train.remat=stage,full",
    "lora.rank=16",
)
_EIGHT = ("mesh.model=8", "train.num_microbatches=8")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("variant", [(), ("lora.use_dora=true",)], ids=["LoRA", "DoRA"])
def test_adapters_of_a_70b_fit_on_8_gpus_and_leave_its_collectives(variant):
    run = steps.make_run("llama:3-70b", (*_ADAPTERS, *_EIGHT, *variant))
    assert 0.996 < run.num_frozen / run.num_params < 1
    compiled = steps.compiled_bytes(run)
    assert compiled < 25 * 2**30
    assert 0.9 < run.estimate_memory().device_bytes / compiled < 1.1
    found = [c for c in collectives(run.compile_train_step(), run.mesh) if c.loop == "layers"]
    sums = {kind: sum(c.bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}}
    # The sums of branches stay reduce-scatters, and the sums of adapters are narrow.
    tokens_bytes = 8 * 4096 * 8192 * 2 * 80
    assert sums["all-reduce"] < 0.1 * tokens_bytes
    assert sums["all-gather"] < 7 * tokens_bytes
