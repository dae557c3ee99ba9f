"""The benchmark on digits: its runs are runs, and its table says what they gave."""

import pytest

from benchmarks.digits import EXPERIMENTS, as_text, main
from tests.runs import ROOT
from train.config import resolve
from train.config_files import load


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_are_of_configs_as_they_are(name):
    """Each ends with an evaluation of all held-out digits, and no step's result is picked."""
    for training in EXPERIMENTS[name]:
        config = resolve(load(str(ROOT / "configs" / f"{training.config}.py"), training.overrides))
        assert config.data.name == "digits" and config.eval.num_batches is None
    assert config.data.objective == "image_classification"


def test_table_has_the_accuracies_of_all_seeds():
    result = {"accuracies": [0.95, 0.9714], "seconds": [50.0, 70.0]}
    rows = as_text({"experiments": {"ViT": result}}).splitlines()
    assert rows[2:] == ["| ViT | 95.0, 97.1 | 96.1 % | 60 |"]


def test_unknown_experiment_is_refused(capsys):
    assert main(["--only=nothing"]) == 2
    assert "choose from ViT; Swin" in capsys.readouterr().err
