"""Tests of `benchmarks.digits`: its experiments, its result file and its table in the docs."""

import json

import pytest

from benchmarks import digits
from benchmarks.digits import EXPERIMENTS, as_text, main
from tests.runs import ROOT
from train.config.config_files import load
from train.config.schema import validate_config


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_use_the_configs_unchanged(name):
    """Each run ends with an evaluation of all held-out digits; no best step is selected."""
    for training in EXPERIMENTS[name]:
        config = validate_config(
            load(str(ROOT / "configs" / f"{training.config}.py"), training.overrides)
        )
        assert config.data.name == "digits" and config.eval.num_batches is None
    assert config.data.objective == "image_classification"


def test_table_shows_the_accuracy_of_every_seed():
    result = {"accuracies": [0.95, 0.9714], "seconds": [50.0, 70.0]}
    rows = as_text({"ViT": result}).splitlines()
    assert rows[2:] == ["| ViT | 95.0, 97.1 | 96.1 % | 60 |"]


def test_writing_results_keeps_other_experiments(tmp_path, monkeypatch):
    accuracies = iter([[0.9], [0.8], [0.7]])

    def found(*_):
        return {"runs": [], "accuracies": next(accuracies), "seconds": [1.0]}

    monkeypatch.setattr(digits, "experiment", found)
    out = tmp_path / "figures.json"
    for only in ("Swin", "ResMLP", "Swin"):
        assert main([f"--only={only}", f"--out={out}"]) == 0
    figures = json.loads(out.read_text())
    assert {name: result["accuracies"] for name, result in figures.items()} == {
        "Swin": [0.7],
        "ResMLP": [0.8],
    }
    assert f"--only=ResMLP --out={out}" in figures["ResMLP"]["command"]


def test_invalid_results_file_is_rejected_before_a_run(tmp_path, capsys):
    out = tmp_path / "figures.json"
    out.write_text("figures")
    assert main(["--only=Swin", f"--out={out}"]) == 2
    assert f"--out={out} cannot be read as JSON" in capsys.readouterr().err
    assert out.read_text() == "figures"


def test_docs_show_the_stored_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu_digits.json").read_text())
    assert list(results) == list(EXPERIMENTS)
    assert as_text(results) in (ROOT / "docs" / "vision.md").read_text()


def test_no_seed_is_refused(capsys):
    assert main(["--only=Swin", "--seeds=0"]) == 2
    assert "--seeds=0 must be at least 1" in capsys.readouterr().err


def test_unknown_experiment_is_refused(capsys):
    assert main(["--only=nothing"]) == 2
    assert "choose from ViT; Swin" in capsys.readouterr().err
