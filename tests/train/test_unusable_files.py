"""Files in the workdir that cannot be used end a start with one sentence, not in the loop."""

import errno
import os

import pytest

from tests.runs import TINY
from tests.train.refusals import refusal

#: What is in the place of a file or folder of the run -> the error message.
OBSTACLES = {
    "metrics.jsonl/": "is not a regular file; replace it by one",
    "metrics.jsonl|": "is not a regular file; replace it by one",
    "tensorboard": "there is a file of this name",
    "goodput": "there is a file of this name",
    "checkpoints": "there is a file of this name",
    "hf": "there is a file of this name",
    "lock/": "it is a directory",
}


@pytest.fixture
def overrides(corpus_overrides):
    return (*TINY, *corpus_overrides, "train.num_steps=1", "model.num_layers=1")


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_obstacle_in_the_workdir_is_refused_by_name(obstacle, overrides, tmp_path, capsys):
    path = tmp_path / obstacle.rstrip("/|")
    if obstacle.endswith("/"):
        path.mkdir()
    elif obstacle.endswith("|"):
        os.mkfifo(path)
    else:
        path.write_text("not a folder")
    error = refusal(tmp_path, overrides, capsys)
    assert str(path) in error and OBSTACLES[obstacle] in error


def test_metrics_file_without_write_permission_is_refused(overrides, tmp_path, capsys, monkeypatch):
    def refuse(path, _):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("train.reporting.metrics.open_in_place", refuse)
    error = refusal(tmp_path, overrides, capsys)
    assert f"{tmp_path}/metrics.jsonl cannot be used: you have no permission" in error
    assert "choose another path" in error


@pytest.mark.parametrize("key", ["data.cache_dir", "data.paths", "data.tokenizer"])
def test_nul_in_a_path_of_the_config_is_refused_by_key(key, overrides, tmp_path, capsys):
    error = refusal(tmp_path, (*overrides, f"{key}=a\0b"), capsys)
    assert f"{key}=" in error and "must not contain a NUL character" in error


def test_nul_in_the_workdir_is_refused_by_name(overrides, capsys):
    error = refusal("a\0b", overrides, capsys)
    assert "--workdir='a\\x00b' must not contain a NUL character" in error
