"""Every model has the same losses on every mesh; the docs have a table with the differences."""

import pytest

from configs.vit_probe import FROZEN
from tests.train.meshes import models_on_meshes as measured

#: Rounding errors in float64 are about 1e-16 per sum. 5 steps of Adam amplify them, but bugs cause
#: far larger differences.
TOLERANCE = 1e-9
_ON_OTHER_MESHES = {
    ("LLaMA", "model=2"),
    ("BERT", "data=4"),
    ("T5 1.1", "pipeline=2, vocab shared"),
    ("ViT", "fsdp=4"),
}


def combinations():
    """Yield all cases; CI runs each model on 2×2×2, and some on another mesh."""
    for model in measured.MODELS:
        for mesh in measured.MESHES:
            if measured.applies(model, mesh):
                is_run = mesh == "2×2×2" or (model, mesh) in _ON_OTHER_MESHES
                yield pytest.param(model, mesh, marks=[pytest.mark.slow] * (not is_run))


@pytest.mark.thorough(but=[r"ResMLP-2\xd72\xd72"])
@pytest.mark.parametrize(("model", "mesh"), list(combinations()))
def test_losses_equal_one_device(model, mesh):
    assert measured.deviation(model, mesh) <= TOLERANCE
    assert len(set(measured.losses_on(model, ()))) == measured.NUM_STEPS  # the model learns


@pytest.mark.thorough
def test_losses_of_a_linear_probe_equal_one_device():
    """Only the head is trained, so the stages exchange no gradients."""
    probe = f"optimizer.frozen={','.join(FROZEN)}"
    mesh = (*measured.MESHES["2×2×2"], probe)
    assert measured.losses_on("ViT", mesh) == pytest.approx(
        measured.losses_on("ViT", (probe,)), rel=TOLERANCE, abs=0
    )


def test_table_of_the_docs_has_all_models_and_meshes():
    text = measured.DOCS.read_text()
    rows = text.partition(measured.START)[2].partition(measured.END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["model", *measured.MESHES]
    assert [row[0] for row in cells[2:]] == list(measured.MODELS)
    values = [value for row in cells[2:] for value in row[1:] if value != measured.NO_VOCAB]
    assert all(float(value) <= TOLERANCE for value in values)
