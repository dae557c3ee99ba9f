"""Earlier configs of a run are kept, and changed keys are logged when it resumes."""

import logging

import pytest
import yaml

from tests.runs import TINY, arguments
from train.lifecycle.config_history import write_config
from train.main import main

pytestmark = pytest.mark.usefixtures("shared_steps")

A = {"init_from": "", "optimizer": {"learning_rate": 0.01, "betas": (0.9, 0.95)}}
B = {"init_from": "", "optimizer": {"learning_rate": 1e-5, "betas": (0.9, 0.95)}}


@pytest.fixture
def write(tmp_path, caplog):
    """Writes a config, and returns the log."""
    caplog.set_level(logging.INFO)

    def write(config, saved=None):
        caplog.clear()
        write_config(tmp_path, config, saved, dict)
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["optimizer"] == {
            **config["optimizer"],
            "betas": [0.9, 0.95],
        }
        return caplog.text

    return write


def rates(directory) -> list[float]:
    """Return the learning rates of the configs that are kept, in the order of their names."""
    texts = [path.read_text() for path in sorted((directory / "configs").glob("*"))]
    return [yaml.safe_load(text)["optimizer"]["learning_rate"] for text in texts]


def test_each_earlier_config_is_kept_once(write, tmp_path):
    assert write(A) == write(A) == ""
    assert not (tmp_path / "configs").exists()
    assert "optimizer.learning_rate: 0.01 -> 1e-05" in write(B)
    assert "optimizer.learning_rate: 1e-05 -> 0.01" in write(A)
    write(B)
    assert rates(tmp_path) == [0.01, 1e-5]


def test_config_that_was_edited_in_place_is_compared_with_the_checkpoint(write, tmp_path):
    write(A)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**B, "optimizer": {"learning_rate": 1}}))
    assert "optimizer.learning_rate: 0.01 -> 1e-05" in write(B, saved=A)
    assert rates(tmp_path) == [0.01, 1]


@pytest.mark.parametrize("content", [b"a: [", b"\xff", b"optimizer: 3"])
def test_config_that_cannot_be_read_is_replaced_with_a_warning(content, write, tmp_path):
    (tmp_path / "config.yaml").write_bytes(content)
    assert "config.yaml" in write(A)


@pytest.mark.thorough
def test_resume_tells_which_keys_have_changed(corpus_overrides, tmp_path, capsys):
    overrides = [*TINY, *corpus_overrides, "model.num_layers=1", "train.num_steps=1"]
    assert main(arguments(tmp_path, overrides)) == 0
    assert "has changed" not in capsys.readouterr().err
    overrides += ["train.num_steps=2", "optimizer.learning_rate=3e-4"]
    assert main(arguments(tmp_path, overrides)) == 0
    changes = "  optimizer.learning_rate: 0.01 -> 0.0003\n  train.num_steps: 1 -> 2\n"
    assert changes in capsys.readouterr().err
    assert rates(tmp_path) == [0.01]
