"""Tests of `benchmarks.estimates`: its cases, the bounds of its results, and tables in the docs."""

from pathlib import Path

import pytest

from benchmarks import estimates
from benchmarks.harness import docs_page, gpu_estimates

ROOT = Path(__file__).parents[2]


def test_docs_show_the_results():
    """After the results change, run `python -m benchmarks.estimates --docs`."""
    page = ROOT / "docs" / "memory.md"
    assert docs_page.with_tables(page, estimates.tables()) == page.read_text(encoding="utf-8")


def test_writing_tables_requires_markers_in_the_docs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no tables here", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks <!-- cpu estimates -->"):
        docs_page.with_tables(page, {"cpu estimates": ""})


def test_every_config_is_a_case_on_every_mesh():
    names = {case.name for case in gpu_estimates.cases()}
    for config in gpu_estimates.config_names():
        assert {f"{config}, {mesh}" for mesh in gpu_estimates.MESHES} <= names
    assert {"gpt2", "swin", "moco"} <= set(gpu_estimates.config_names())


def test_case_names_every_axis_and_counts_its_gpus():
    case = next(c for c in gpu_estimates.cases() if c.name == "gpt2_3d, 2×2×2")
    assert case.num_gpus == 8 and "mesh.fsdp=1" in case.overrides
    assert next(c for c in gpu_estimates.cases() if c.name == "gpt2_3d, one GPU").num_gpus == 1


@pytest.mark.parametrize(
    ("model", "ratio", "is_within"),
    [(2**30, 0.96, False), (2**30, 1.1, True), (2**20, 0.96, True), (2**20, 0.89, False)],
)
def test_bounds_are_wider_for_small_models(model, ratio, is_within):
    assert gpu_estimates.is_within({"model": model, "ratio": ratio}) == is_within


@pytest.mark.parametrize(
    "found", estimates.h100_results(), ids=lambda found: found["versions"]["jax"]
)
def test_results_are_within_their_bounds(found):
    assert gpu_estimates.out_of_bounds(found["cases"]) == []
    assert len(found["cases"]) == len(gpu_estimates.cases())


def test_results_out_of_bounds_are_bold():
    figures = {"model": 2**30, "estimated": 9, "compiled": 10, "ratio": 0.9, "gpus": 1}
    assert gpu_estimates.tables({"gpt2, one GPU": figures}).count("**0.90**") == 1
    assert gpu_estimates.out_of_bounds({"gpt2, one GPU": figures}) == ["gpt2, one GPU"]
