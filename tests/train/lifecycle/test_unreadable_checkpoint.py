"""A run whose checkpoints cannot be read for a while loses none of them, and is started again."""

import errno
import os
import shutil

import pytest

from checkpoint import errors
from convert import to_hf
from tests.checkpoint.faults import fail_to_read
from tests.runs import TINY, arguments, write_corpus
from tests.train.refusals import refusal
from train.lifecycle.exit_codes import FAILED, FINISHED
from train.main import main

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4, and its overrides."""
    directory = tmp_path_factory.mktemp("trained")
    changes = ("train.num_steps=4", "optimizer.schedule=constant", "checkpoint.every_steps=2")
    overrides = (*TINY, *write_corpus(directory), *changes)
    assert main(arguments(directory / "v[1]", overrides)) == FINISHED
    return directory / "v[1]", overrides


@pytest.fixture
def copy(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "DELAYS_S", (0.0, 0.0))
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    return run, (*trained[1], "train.num_steps=5")


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "name, code", [("config.yaml", errno.EIO), ("state", errno.EACCES), ("", errno.ESTALE)]
)
def test_run_that_cannot_read_a_checkpoint_is_restarted_and_loses_nothing(
    name, code, copy, monkeypatch, capsys
):
    workdir, overrides = copy
    checkpoints = workdir / "checkpoints"
    # Without a name, all reads of all checkpoints fail.
    unreadable = checkpoints / "4" / name if name else checkpoints
    with monkeypatch.context() as patch:
        fail_to_read(patch, unreadable, code)
        assert main(arguments(workdir, overrides)) == FAILED
    log = capsys.readouterr().err
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {unreadable}")
    assert f"cannot be read ({os.strerror(code)})" in line
    assert "damaged" not in log and "Skipping" not in log and "Traceback" not in log
    assert sorted(os.listdir(checkpoints)) == ["2", "4"]
    assert main(arguments(workdir, overrides)) == FINISHED
    assert "step 4 of train.num_steps=5 is saved; resuming" in capsys.readouterr().err
    assert sorted(os.listdir(checkpoints)) == ["2", "4", "5"]


def test_workdir_that_cannot_have_checkpoints_is_refused(tmp_path, capsys):
    error = refusal(tmp_path / "a\\b", TINY, capsys)
    assert "checkpoints cannot be stored in" in error and "choose another directory" in error
    assert os.listdir(tmp_path) == []


def test_run_resumes_after_read_errors_that_pass(copy, monkeypatch, capsys):
    workdir, overrides = copy
    fail_to_read(monkeypatch, workdir / "checkpoints" / "4" / "config.yaml", errno.EIO, num_times=2)
    assert main(arguments(workdir, overrides)) == FINISHED
    assert "step 4 of train.num_steps=5 is saved; resuming" in capsys.readouterr().err


@pytest.mark.thorough
def test_conversion_and_init_from_do_not_call_an_unreadable_checkpoint_damaged(
    copy, tmp_path, monkeypatch, capsys
):
    run, overrides = copy
    fail_to_read(monkeypatch, run / "checkpoints" / "4" / "state", errno.EIO)
    assert to_hf.main([str(run), str(tmp_path / "out")]) == 2
    exported = capsys.readouterr().err
    assert main(arguments(tmp_path / "new", (*overrides, f"init_from={run}"))) == FAILED
    started = capsys.readouterr().err
    for log in (exported, started):
        (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
        assert f"error: {run}/checkpoints/4/state/" in line and "cannot be read" in line
        assert "damaged" not in log and "skipped" not in log
