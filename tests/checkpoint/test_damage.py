"""Damaged and half-written checkpoints are detected, skipped, and set aside by the next save."""

import logging
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from checkpoint.checksums import find_damage
from checkpoint.errors import SaveError
from tests.checkpoint.states import abstract, assert_same_bits, make_state


def flip_a_bit(path: Path):
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "flipped bit": flip_a_bit,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_skips_a_checkpoint_with_any_damaged_file(
    two_steps, tmp_path, open_checkpoints, caplog, damage
):
    wanted = abstract(make_state(0))
    contents = {step: make_state(step) for step in (1, 2)}
    files = sorted(p.relative_to(two_steps) for p in (two_steps / "2").rglob("*") if p.is_file())
    assert len(files) > 6  # the exact number depends on how Orbax groups array data into files
    for index, name in enumerate(files):
        directory = Path(shutil.copytree(two_steps, tmp_path / str(index)))
        DAMAGES[damage](directory / name)
        caplog.clear()
        step, state, data_state = open_checkpoints(directory).restore(wanted)
        assert_same_bits(state, contents[step])
        assert data_state == {"position": step}
        assert step == 1, f"{damage} {name} went unnoticed"
        (warning,) = [r for r in caplog.records if r.name == "checkpoint.manager"]
        assert warning.levelno == logging.WARNING
        assert str(directory / "2") in warning.getMessage()
        # A flipped bit in the checksum list may change a file's name; then the warning names it.
        if damage != "flipped bit" or name.name != "checksums.sha256":
            assert name.relative_to("2").as_posix() in warning.getMessage()


@pytest.mark.parametrize("change", [lambda path: path.write_text("seed: 7"), Path.unlink])
def test_config_without_a_checksum_is_not_compared(damaged_copy, open_checkpoints, change):
    """Older versions wrote a config without a checksum, or none."""
    directory = damaged_copy()
    change(directory / "2" / "config.yaml")
    sums = directory / "2" / "checksums.sha256"
    _, *lines = sums.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "config.yaml" not in line]
    sums.write_text("".join([f"# {len(kept)} files\n", *kept]))
    assert len(kept) == len(lines) - 1
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 2


def test_restore_detects_a_checksum_list_truncated_between_lines(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    sums = directory / "2" / "checksums.sha256"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(lines[:3]))
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 1


@pytest.mark.parametrize("unfinished", ["", "state", "checksums.sha256"])
def test_restore_skips_an_unfinished_checkpoint(damaged_copy, open_checkpoints, caplog, unfinished):
    """Other tools may leave an empty directory, a state without checksums, or only checksums."""
    directory = damaged_copy()
    (directory / "3").mkdir()
    if unfinished == "state":
        shutil.copytree(directory / "2" / "state", directory / "3" / "state")
    elif unfinished:
        shutil.copy(directory / "2" / unfinished, directory / "3")
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 2
    assert str(directory / "3") in caplog.text and "missing" in caplog.text


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_checksums_can_be_checked_by_coreutils(two_steps):
    command = ["sha256sum", "--check", "--strict", "checksums.sha256"]
    subprocess.run(command, cwd=two_steps / "2", check=True, capture_output=True)


def test_restore_with_all_damaged_raises_an_error_with_the_directory(
    damaged_copy, open_checkpoints
):
    directory = damaged_copy()
    for path in directory.glob("*/state/_METADATA"):
        flip_a_bit(path)
    checkpoints = open_checkpoints(directory)
    for _ in range(2):  # the second call must not treat the directory as empty
        with pytest.raises(ValueError, match=rf"all checkpoints in {directory} .*steps 1, 2"):
            checkpoints.restore(abstract(make_state(0)))


def test_damaged_checkpoint_is_set_aside_once_another_is_complete(
    damaged_copy, open_checkpoints, monkeypatch
):
    """It is not deleted, because a file may be missing or altered for a moment only."""
    directory = damaged_copy()
    flip_a_bit(directory / "2" / "data_state" / "metadata")
    checkpoints = open_checkpoints(directory)
    assert checkpoints.restore(abstract(make_state(0)))[0] == 1

    def fail(_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.directory.write_checksums", fail)
        checkpoints.save(3, make_state(3), {})
        with pytest.raises(SaveError):
            checkpoints.wait()
    assert (directory / "2").exists()
    assert checkpoints.all_steps() == [1]
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [1, 3]
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2.damaged", "3"]


def test_checkpoint_that_was_set_aside_is_never_overwritten(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    original = damaged_copy("original") / "2"
    first = (original / "data_state" / "metadata").read_bytes()
    for number in (1, 2, 3):
        if number > 1:
            shutil.copytree(original, directory / "2")
        (directory / "2" / "data_state" / "metadata").write_bytes(first + b" " * number)
        checkpoints = open_checkpoints(directory)
        checkpoints.restore(abstract(make_state(0)), before_step=3)
        checkpoints.save(2 + number, make_state(3), {})
        checkpoints.wait()
    for number, name in ((1, "2.damaged"), (2, "2.damaged-2"), (3, "2.damaged-3")):
        content = (directory / name / "data_state" / "metadata").read_bytes()
        assert content == first + b" " * number


def test_verification_says_that_a_checkpoint_was_deleted_meanwhile(damaged_copy, monkeypatch):
    directory = damaged_copy() / "2"
    monkeypatch.setattr("checkpoint.checksums._compare", lambda *_: shutil.rmtree(directory))
    assert find_damage(directory) == f"{directory} was deleted while it was read"


def test_tidy_removes_leftovers_of_a_killed_process(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    for name in ("3.orbax-checkpoint-tmp-1", "1.orbax-checkpoint-tmp-deleted-4"):
        shutil.copytree(directory / "1", directory / name)
    open_checkpoints(directory).tidy()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_save_replaces_a_skipped_damaged_checkpoint(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    flip_a_bit(directory / "2" / "data_state" / "metadata")
    checkpoints = open_checkpoints(directory)
    assert checkpoints.restore(abstract(make_state(0)))[0] == 1
    assert checkpoints.all_steps() == [1]
    assert (directory / "2").exists(), "restore must not delete anything"
    assert checkpoints.save(2, make_state(7), {"position": 7})
    checkpoints.wait()
    step, state, data_state = open_checkpoints(directory).restore(abstract(make_state(0)))
    assert (step, data_state) == (2, {"position": 7})
    assert_same_bits(state, make_state(7))
