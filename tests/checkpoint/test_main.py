"""Tests of `python -m checkpoint`: its output, and that it changes no file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from checkpoint.__main__ import main
from checkpoint.config import CheckpointConfig
from checkpoint.layout import steps_in
from checkpoint.manager import Checkpoints

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A run with checkpoints 10, 20 and 100. Step 20 is the best, and 100 was not evaluated."""
    run = tmp_path_factory.mktemp("run")
    config = CheckpointConfig(every_steps=1, max_to_keep=3)
    checkpoints = Checkpoints(run / "checkpoints", config)
    for step, metrics in ((10, {"eval_loss": 2.5}), (20, {"eval_loss": 1.25}), (100, None)):
        params = {"embed": jnp.ones((16, 8)), "scale": jnp.ones((), jnp.bfloat16)}
        checkpoints.save(step, {"params": params}, {"position": step}, metrics)
    checkpoints.close()
    return run


@pytest.fixture
def copy(run_directory, tmp_path):
    return Path(shutil.copytree(run_directory, tmp_path / "copy"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_ls_marks_the_newest_and_the_best(run_directory, capsys):
    before = contents(run_directory)
    assert main(["ls", str(run_directory)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "saved", "metrics"]
    when = r"\d+\.\d KiB  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for row, pattern in zip(
        rows,
        (r"10  {} +eval_loss 2.5", r"20  {}  best +eval_loss 1.25", r"100  {}  newest"),
        strict=True,
    ):
        assert re.fullmatch(pattern.format(when), row.strip()), row
    assert contents(run_directory) == before
    assert main(["ls", str(run_directory / "checkpoints"), "--best_is_max"]) == 0
    assert re.search(r"10 .* best", capsys.readouterr().out)


def test_ls_shows_incomplete_checkpoints(copy, capsys):
    directory = copy / "checkpoints"
    (directory / "10" / "state" / "_METADATA").unlink()
    (directory / "20" / "checksums.sha256").write_text("")
    (directory / "120").mkdir()
    (directory / "130.orbax-checkpoint-tmp-1").mkdir()
    (directory / "90.damaged").mkdir()
    assert main(["ls", str(copy)]) == 0
    output = capsys.readouterr().out
    assert "incomplete: state/_METADATA is missing" in output
    assert output.count("incomplete: checksums.sha256 is missing or not a list") == 2
    assert "130.orbax-checkpoint-tmp-1 is being written" in output
    assert "90.damaged was found damaged and set aside" in output
    assert (directory / "130.orbax-checkpoint-tmp-1").exists()


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_checkpoints_deleted_during_a_command_are_not_an_error(copy, capsys, monkeypatch, command):
    directory = copy / "checkpoints"
    (step, *others) = steps_in(directory)

    def deletes(directory: Path) -> list[int]:
        shutil.rmtree(directory / str(step), ignore_errors=True)
        return [step, *others]

    monkeypatch.setattr("checkpoint.__main__.steps_in", deletes)
    assert main([command, str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # In addition, `ls` prints the table's header, and `verify` a line about the deleted checkpoint.
    assert len(lines) == len(others) + 1


def test_verify_names_each_damaged_checkpoint(copy, capsys):
    assert main(["verify", str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    pattern = r"step {}: intact, \d+ files, \d+\.\d KiB"
    for line, step in zip(lines, (10, 20, 100), strict=True):
        assert re.fullmatch(pattern.format(step), line)
    file = copy / "checkpoints" / "20" / "data_state" / "metadata"
    file.write_bytes(b"X" + file.read_bytes()[1:])
    assert main(["verify", str(copy)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "step 20: damaged: data_state/metadata has changed since it was written"
        " (its SHA-256 differs)"
    )
    assert "intact" in lines[0] and "intact" in lines[2]
    assert main(["verify", str(copy), "--step=20"]) == 1
    assert main(["verify", str(copy), "--step=100"]) == 0


def test_show_lists_the_arrays(run_directory, capsys):
    assert main(["show", str(run_directory), "--step=20"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["params.embed", "float32[16,", "8]", "512", "bytes"],
        ["params.scale", "bfloat16[]", "2", "bytes"],
        ["2", "arrays,", "129", "numbers,", "514", "bytes"],
        ["data_state:", '{"position":', "20}"],
    ]


@pytest.mark.parametrize("name", ["state/_METADATA", "state/manifest.ocdbt", "data_state/metadata"])
def test_show_reports_a_damaged_checkpoint_in_one_sentence(copy, capsys, name):
    (copy / "checkpoints" / "100" / name).write_bytes(b"garbage")
    assert main(["show", str(copy)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: step 100 cannot be read (")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ls", "{}/nowhere"], "contains no checkpoint"),
        (["verify", "{}", "--step=7"], "--step=7 .* choose one of 10, 20, 100"),
        (["show", "{}", "--step=7"], "--step=7"),
    ],
)
def test_errors_are_reported_in_one_sentence(run_directory, capsys, arguments, message):
    assert main([argument.format(run_directory) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_commands_do_not_import_jax(run_directory, command):
    program = (
        "import sys; from checkpoint.__main__ import main; code = main(sys.argv[1:])\n"
        "assert 'jax' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, str(run_directory)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
