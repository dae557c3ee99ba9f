"""Every model compiles for an H100 on every kind of mesh, with cuDNN's attention."""

import pytest

from tests.gpu import steps
from tests.train.models_on_meshes import MODELS

pytestmark = pytest.mark.gpu_compiler


@pytest.mark.parametrize("mesh", steps.MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_step_compiles_with_fused_attention(model, mesh):
    overrides = steps.MESHES[mesh]
    if MODELS[model][0] == "moco" and "pipeline" in mesh:
        overrides = (*overrides, "train.num_microbatches=1")
    run = steps.model_run(model, *overrides)
    text = steps.text_of(run)
    kernels = {choice.kernel for choice in run.attention}
    assert kernels == (set() if model == "ResMLP" else {"cudnn"})
    assert ("__cudnn$fmha" in text) == bool(kernels)
    assert steps.compiled_bytes(run) > 0
    steps.forget()
