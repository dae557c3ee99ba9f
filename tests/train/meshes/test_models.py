"""Every model has the same losses on every mesh; the docs have a table with the differences."""

import pytest

from configs.vit_probe import FROZEN
from tests.train.meshes import models_on_meshes as measured

#: Rounding errors in float64 are about 1e-16 per sum. 5 steps of Adam amplify them, but bugs cause
#: far larger differences.
TOLERANCE = 1e-9
ON_2X2X2 = "2×2×2"
ON_OTHERS = [
    (model, mesh)
    for model in measured.MODELS
    for mesh in measured.MESHES
    if mesh != ON_2X2X2 and measured.applies(model, mesh)
]


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", measured.MODELS)
def test_losses_on_2x2x2_equal_one_device(model):
    check_losses(model, ON_2X2X2)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("model", "mesh"), ON_OTHERS)
def test_losses_on_other_meshes_equal_one_device(model, mesh):
    check_losses(model, mesh)


def check_losses(model: str, mesh: str) -> None:
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
    values = [value for row in cells[2:] for value in row[1:] if value != measured.DOES_NOT_APPLY]
    assert all(float(value) <= TOLERANCE for value in values)
