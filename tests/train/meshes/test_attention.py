"""cuDNN attention in training steps on meshes, with a stand-in for the kernel.

The wrapper, its shard_map over heads and its document masks are the code that GPUs run.
"""

import pytest

from tests.models.layers import cudnn_stand_in
from tests.train.meshes import models_on_meshes as measured

#: The same as in test_models.py.
TOLERANCE = 1e-9

#: One model for each feature of attention: documents, fewer key-value heads with a sliding window,
#: padding, a bias with cross-attention, an odd length, shifted windows.
CASES = [
    ("GPT-2, documents apart", ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")),
    ("GPT-2, documents apart", ("mesh.context=2", "mesh.model=2")),
    ("Mistral", ("mesh.model=4", "rules.kv_heads=()")),
    ("Mistral", ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")),
    ("BERT, classifier", ("mesh.fsdp=2", "mesh.model=2")),
    ("T5 1.1", ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")),
    ("ViT", ("mesh.data=2", "mesh.model=2", "memory.zero_stage=2")),
    ("Swin", ("mesh.pipeline=2", "mesh.model=2")),
]


@pytest.mark.slow(only=["GPT-2, documents apart-mesh1", "BERT, classifier-mesh4", "Swin-mesh7"])
@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_losses_equal_plain_attention_on_one_device(monkeypatch, model, mesh):
    expected = measured.losses_on(model, ())
    cudnn_stand_in.install(monkeypatch)
    found = measured.losses_on.__wrapped__(model, mesh)
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)
