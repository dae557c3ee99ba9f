"""A checkpoint that cannot be read is read again; it is not damaged, and is never lost."""

import errno
import os

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from checkpoint import errors
from checkpoint.__main__ import main
from checkpoint.arrays import find_damage_of_arrays
from checkpoint.checksums import find_damage, find_missing, write_checksums
from checkpoint.config import CheckpointConfig
from checkpoint.errors import ReadError, SaveError
from checkpoint.lazy import stored_arrays
from checkpoint.manager import Checkpoints
from distributed.messages import may_pass
from tests.checkpoint.faults import fail_to_read, no_files_can_be_opened
from tests.checkpoint.states import abstract, assert_same_bits, make_state

CODES = ("EIO", "ESTALE", "EACCES", "ENOTCONN", "ETIMEDOUT")
FILES = ("checksums.sha256", "config.yaml", "data_state/metadata", "state/_METADATA", "state/d")


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(errors, "DELAYS_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("code", CODES)
def test_restore_repeats_reads_that_fail(damaged_copy, open_checkpoints, monkeypatch, code):
    directory = damaged_copy()
    fail_to_read(monkeypatch, directory / "2" / "state", getattr(errno, code), num_times=3)
    step, state, _ = open_checkpoints(directory).restore(abstract(make_state(0)))
    assert step == 2
    assert_same_bits(state, make_state(2))


@pytest.mark.parametrize(
    "code, name", [*((code, "state") for code in CODES), *(("EIO", name) for name in FILES)]
)
def test_checkpoint_that_cannot_be_read_is_neither_skipped_nor_lost(
    damaged_copy, open_checkpoints, monkeypatch, code, name
):
    directory = damaged_copy()
    checkpoints = open_checkpoints(directory)
    with monkeypatch.context() as patch:
        fail_to_read(patch, directory / "2" / name, getattr(errno, code))
        reason = os.strerror(getattr(errno, code))
        with pytest.raises(ReadError, match=rf"2/{name}.* cannot be read \({reason}\)") as error:
            checkpoints.restore(abstract(make_state(0)))
    assert may_pass(error.value), "a launcher would not start the run again"
    assert "damaged" not in str(error.value) and "\n" not in str(error.value)
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [1, 2, 3]
    assert checkpoints.restore(abstract(make_state(0)), before_step=3)[0] == 2


def test_error_of_tensorstore_is_a_read_error(two_steps):
    array = stored_arrays(two_steps / "2")["params.embed.table"]
    part = (slice(0, 32), slice(0, 8))
    with no_files_can_be_opened():
        with pytest.raises(ReadError, match=rf"{two_steps}/2/state/\S+ .*Too many open files"):
            array.read(part)
        with pytest.raises(ReadError, match=rf"{two_steps}/2/state\S* .*Too many open files"):
            stored_arrays(two_steps / "2")
    assert array.read(part).shape == (32, 8)


@pytest.mark.parametrize("num_times", [3, 4])
def test_error_of_tensorstore_in_orbax_is_a_read_error(
    two_steps, open_checkpoints, monkeypatch, num_times
):
    restore = ocp.PyTreeCheckpointHandler.restore
    file = two_steps / "2" / "state" / "d" / "1f"
    failed = []

    def restore_or_fail(*arguments, **options):
        if len(failed) < num_times:
            failed.append(1)
            error = ValueError(  # as TensorStore 0.1.86 raises it
                'UNKNOWN: Error reading shard entry {0}/{1} in "a/c/0" in OCDBT database at local '
                f'file "{two_steps}/2/state/": Failed to read: "{file}": Input/output error '
                "[os_error_code='5']"
            )
            raise Exception("Encountered error while reading array index: ()") from error
        return restore(*arguments, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore_or_fail)
    checkpoints = open_checkpoints(two_steps)
    if num_times < 4:
        assert checkpoints.restore(abstract(make_state(0)))[0] == 2
        return
    with pytest.raises(ReadError, match=rf"{file} cannot be read \(Input/output error\)"):
        checkpoints.restore(abstract(make_state(0)))


def test_directory_that_cannot_be_read_is_not_empty(two_steps, monkeypatch):
    """A run that took it for empty would start again from step 0."""

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ReadError, match=rf"{two_steps} cannot be read \(Permission denied\)"):
        Checkpoints(two_steps, CheckpointConfig(every_steps=1, max_to_keep=3))


def test_best_checkpoint_is_kept_if_its_metrics_cannot_be_read(tmp_path, monkeypatch):
    config = CheckpointConfig(every_steps=1, max_to_keep=1, keep_best=1)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        with monkeypatch.context() as patch:
            fail_to_read(patch, tmp_path / "1" / "metrics", errno.EIO, num_times=3)
            checkpoints = Checkpoints(tmp_path, config)
        checkpoints.save(step, {"x": jnp.ones(3)}, {}, {"eval_loss": loss})
        checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]
    fail_to_read(monkeypatch, tmp_path / "1" / "metrics", errno.EIO)
    with pytest.raises(ReadError, match="1/metrics/metrics cannot be read"):
        Checkpoints(tmp_path, config)


def test_save_whose_files_cannot_be_read_back_fails(tmp_path, open_checkpoints, monkeypatch):
    """Its checksums would be unknown, and the next start would take it for damaged."""
    fail_to_read(monkeypatch, tmp_path, errno.EIO)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(3)}, {})
    with pytest.raises(SaveError, match="Input/output error"):
        checkpoints.wait()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_folder_that_cannot_be_listed_is_not_left_out_of_the_checksums(
    damaged_copy, monkeypatch, code
):
    directory = damaged_copy() / "2"
    before = (directory / "checksums.sha256").read_text()
    scandir = os.scandir

    def fail(path="."):
        if os.fspath(path).endswith("state/d"):
            raise OSError(code, os.strerror(code), path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(OSError, match=os.strerror(code)):
            write_checksums(directory)
        with pytest.raises(ReadError, match="state/d cannot be read"):
            find_damage(directory)
    assert (directory / "checksums.sha256").read_text() == before


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "state/d"])
def test_file_whose_status_cannot_be_read_is_not_missing(damaged_copy, monkeypatch, name):
    directory = damaged_copy() / "2"
    stat = os.stat

    def fail(path, **options):
        if isinstance(path, (str, os.PathLike)) and name in os.fspath(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        for function in (find_damage, find_missing, find_damage_of_arrays):
            if name == "state/d" and function == find_damage_of_arrays:
                continue  # TensorStore has functions of its own
            with pytest.raises(ReadError, match=f"{name}.* cannot be read"):
                function(directory)
    assert find_damage(directory) is None


def test_checkpoint_is_not_damaged_if_there_is_too_little_memory(two_steps, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("checkpoint.arrays._open", fail)
    with pytest.raises(MemoryError):
        find_damage(two_steps / "2")


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_commands_report_a_read_error_in_one_sentence(two_steps, monkeypatch, capsys, command):
    fail_to_read(monkeypatch, two_steps / "2", errno.EIO)
    assert main([command, str(two_steps)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {two_steps}/2/") and error.count("\n") == 1
    assert "cannot be read (Input/output error)" in error and "damaged" not in error
