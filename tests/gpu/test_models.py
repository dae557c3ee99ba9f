"""Tests that every model compiles for an H100, with cuDNN's attention, on a mesh that is drawn."""

import pytest

from tests.gpu import steps
from tests.train.meshes.models_on_meshes import MODELS

pytestmark = pytest.mark.gpu_compiler


@pytest.mark.drawn(1, by="model")
@pytest.mark.parametrize("mesh", steps.MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_step_compiles_with_fused_attention(model, mesh):
    overrides = steps.MESHES[mesh]
    if MODELS[model][0] == "moco" and "pipeline" in mesh:
        overrides = (*overrides, "train.num_microbatches=1")
    # One mesh suffices to see that NVIDIA's assembler accepts all kernels.
    run = steps.model_run(model, *overrides, has_machine_code=mesh == "2×2×2")
    text = steps.text_of(run)
    kernels = {selected.kernel for selected in run.attention_kernels}
    expected = set() if model == "ResMLP" else {"cudnn"}
    if model.startswith("ModernBERT"):
        expected |= {"blocked"}  # in layers with a window around each token, which cuDNN lacks
    assert kernels == expected
    assert ("__cudnn$fmha" in text) == bool(kernels)
    assert steps.compiled_bytes(run) > 0
    steps.forget()
