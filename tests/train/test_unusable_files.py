"""Files in the workdir that cannot be used end a start with one sentence, not in the loop."""

import errno
import os

import pytest

from tests.runs import TINY, arguments
from tests.train.refusals import refusal
from train.lifecycle.exit_codes import FINISHED
from train.main import main

pytestmark = pytest.mark.usefixtures("shared_steps")

#: Obstacle in place of a file or folder of the run -> the error message.
OBSTACLES = {
    "metrics.jsonl/": "is not a regular file; replace it by one",
    "metrics.jsonl|": "is not a regular file; replace it by one",
    "tensorboard": "there is a file of this name",
    "goodput": "there is a file of this name",
    "checkpoints": "there is a file of this name",
    "hf": "there is a file of this name",
    "lock/": "is not a regular file; replace it by one",
}


#: Files that a run writes in its workdir, and the temporary files that become these.
WRITTEN = (
    "lock",
    "metrics.jsonl",
    "config.yaml",
    ".config.yaml.tmp",
    "memory.txt",
    ".memory.txt.tmp",
    "run.json",
    ".run.json.tmp",
    "hf/tokenizer.json",
    "hf/.tokenizer.json.tmp",
    "goodput/.0001.json.tmp",
    "watchdog/.0.json.tmp",
)


@pytest.fixture
def overrides(corpus_overrides):
    return (*TINY, *corpus_overrides, "train.num_steps=1", "model.num_layers=1")


@pytest.mark.thorough
@pytest.mark.drawn(3)
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


@pytest.fixture
def private(tmp_path):
    """A private file outside of the workdir `tmp_path/run`."""
    file = tmp_path / "private"
    file.write_text("private")
    return file


@pytest.mark.parametrize("name", WRITTEN)
def test_link_that_leads_out_of_the_workdir_is_refused_by_name(
    name, private, overrides, tmp_path, capsys
):
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(private)
    error = refusal(tmp_path / "run", overrides, capsys)
    assert f"{link} is a link to {private}, outside {tmp_path / 'run'}" in error
    assert private.read_text() == "private"
    assert os.listdir(tmp_path / "run") == [name.partition("/")[0]]


@pytest.mark.thorough
def test_link_that_appears_after_the_check_is_not_followed(
    private, overrides, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("train.lifecycle.workdir.check_links", lambda directory: None)
    links = [tmp_path / "run" / name for name in WRITTEN]
    for link in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(private)
    # Only the lock is opened in place.
    lock = tmp_path / "run" / "lock"
    error = refusal(tmp_path / "run", overrides, capsys)
    assert f"{lock} is a symbolic link, which is not followed" in error
    lock.unlink()
    # One run replaces all other links.
    assert main(arguments(tmp_path / "run", overrides)) == FINISHED
    assert not [link for link in links if link.is_symlink()]
    assert private.read_text() == "private"


def test_hard_link_in_the_place_of_the_lock_is_refused_by_name(
    private, overrides, tmp_path, capsys
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").hardlink_to(private)
    error = refusal(tmp_path / "run", overrides, capsys)
    assert f"{tmp_path / 'run' / 'lock'} is one of 2 names (hard links) of a file" in error
    assert private.read_text() == "private" and private.stat().st_nlink == 2


@pytest.mark.thorough
def test_metrics_that_have_other_names_are_replaced(private, overrides, tmp_path):
    """Copies made by `cp --link`, such as backups, keep their content."""
    (tmp_path / "run").mkdir()
    private.write_text('{"step": 0, "loss": 1.0}\n')
    (tmp_path / "run" / "metrics.jsonl").hardlink_to(private)
    assert main(arguments(tmp_path / "run", overrides)) == FINISHED
    assert private.read_text() == '{"step": 0, "loss": 1.0}\n'
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) > 1


@pytest.mark.thorough
def test_link_to_an_absent_file_creates_no_file(private, overrides, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.lifecycle.workdir.check_links", lambda directory: None)
    private.unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(private)
    error = refusal(tmp_path / "run", overrides, capsys)
    assert "metrics.jsonl is a symbolic link, which is not followed" in error
    assert not private.exists()


def test_metrics_file_without_write_permission_is_refused(overrides, tmp_path, capsys, monkeypatch):
    def refuse(path, _):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("untrusted.appender.open_in_place", refuse)
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
