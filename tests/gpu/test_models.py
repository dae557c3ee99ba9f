"""Tests that every model compiles for an H100 on every kind of mesh, with cuDNN's attention."""

import pytest

from tests.gpu import steps
from tests.train.meshes.models_on_meshes import MODELS

pytestmark = pytest.mark.gpu_compiler


def combinations():
    """Yield every model on every mesh; the slow ones are marked.

    XLA needs minutes to compile Swin V2, so two of its meshes are marked as slow. test_attention.py
    compiles it on fsdp=2 × model=2 instead.
    """
    for model in MODELS:
        for mesh in steps.MESHES:
            is_slow = model == "Swin V2" and mesh in ("model=2", "fsdp=2")
            yield pytest.param(model, mesh, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("model", "mesh"), list(combinations()))
def test_step_compiles_with_fused_attention(model, mesh):
    overrides = steps.MESHES[mesh]
    if MODELS[model][0] == "moco" and "pipeline" in mesh:
        overrides = (*overrides, "train.num_microbatches=1")
    # One mesh suffices to see that NVIDIA's assembler accepts all kernels.
    run = steps.model_run(model, *overrides, has_machine_code=mesh == "2×2×2")
    text = steps.text_of(run)
    kernels = {selected.kernel for selected in run.attention_kernels}
    assert kernels == (set() if model == "ResMLP" else {"cudnn"})
    assert ("__cudnn$fmha" in text) == bool(kernels)
    assert steps.compiled_bytes(run) > 0
    steps.forget()
