"""Tests of failed saves: the run continues, logs one line, and frees the disk space."""

import errno
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoint import directory as checkpoint_directory
from checkpoint.config import CheckpointConfig
from checkpoint.errors import SaveError
from checkpoint.lazy import LazyArray
from checkpoint.manager import Checkpoints

ROOT = Path(__file__).parents[2]
CONFIG = CheckpointConfig(every_steps=1, max_to_keep=2)
SMALL = {"x": jnp.ones(3)}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB, or None without the permission to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True
    )
    if mounting.returncode:
        print(f"cannot mount a file system, so a full disk is simulated: {mounting.stderr}")
        yield None
    else:
        yield disk
        subprocess.run(["umount", disk], check=True)


def errors(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def test_full_disk_is_reported_and_the_next_save_can_succeed(
    small_disk, tmp_path, caplog, capfd, monkeypatch
):
    directory = (small_disk or tmp_path) / "checkpoints"
    checkpoints = Checkpoints(directory, CONFIG)
    with monkeypatch.context() as patch:
        if small_disk is None:

            def full(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

            patch.setattr(checkpoint_directory, "write_checksums", full)
        assert checkpoints.save(1, {f"x{i}": jnp.ones(200_000) for i in range(9)}, {})
        with pytest.raises(SaveError, match=rf"{directory}/1 could .*: No space left on device$"):
            checkpoints.wait()
    assert errors(caplog) == [
        f"Checkpoint {directory}/1 could not be saved: No space left on device."
    ]
    # Threads of the failed save may write into its temporary directory until `close`.
    assert not (directory / "1").exists() and checkpoints.all_steps() == []
    assert checkpoints.last_failure is not None
    assert checkpoints.save(2, SMALL, {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [2] and checkpoints.last_failure is None
    checkpoints.close()
    assert os.listdir(directory) == ["2"]
    assert len(errors(caplog)) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_save_and_close_report_a_failure_and_do_not_raise_it(tmp_path, monkeypatch, caplog):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoints = Checkpoints(tmp_path, CONFIG)
    checkpoints.save(1, SMALL, {})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_directory, "write_checksums", fail)
        assert checkpoints.save(2, SMALL, {}) and checkpoints.save(3, SMALL, {})
        checkpoints.close()
    assert "Input/output error" in str(checkpoints.last_failure)
    assert len(errors(caplog)) == 2
    assert checkpoints.all_steps() == [1] and os.listdir(tmp_path) == ["1"]


def test_save_that_cannot_start_is_reported(tmp_path, caplog):
    """A file replaces the directory, because root can write regardless of permissions."""
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(directory, CONFIG)
    directory.rmdir()
    directory.write_text("")
    assert not checkpoints.save(1, SMALL, {})
    assert errors(caplog) == [f"Checkpoint {directory}/1 could not be saved: Not a directory."]
    with pytest.raises(SaveError, match="Not a directory"):
        checkpoints.wait()
    directory.unlink()
    assert checkpoints.save(2, SMALL, {})
    checkpoints.wait()
    checkpoints.close()
    assert checkpoints.all_steps() == [2] and len(errors(caplog)) == 1


def test_old_checkpoint_that_cannot_be_deleted_is_kept(tmp_path, monkeypatch, caplog):
    def fail(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every_steps=1, max_to_keep=1))
    checkpoints.save(1, SMALL, {})
    checkpoints.wait()
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda s, t: fail(s) if s.name == "1" else rename(s, t))
        checkpoints.save(2, SMALL, {})
        checkpoints.wait()
    assert "1 cannot be deleted: Permission denied" in caplog.text
    assert checkpoints.all_steps() == [1, 2]
    checkpoints.save(3, SMALL, {})
    checkpoints.close()
    assert checkpoints.all_steps() == [3] and os.listdir(tmp_path) == ["3"]


class Wrong(LazyArray):
    shape = (3,)
    dtype = np.dtype(np.float32)

    def read(self, index):
        raise TypeError("a bug")


@pytest.mark.parametrize(
    "state, data_state", [({"x": Wrong()}, {}), (SMALL, {"position": object()})]
)
def test_programming_errors_are_raised(tmp_path, state, data_state):
    checkpoints = Checkpoints(tmp_path, CONFIG)
    with pytest.raises(TypeError):
        checkpoints.save(1, state, data_state)
        checkpoints.close()
    checkpoints.close()
    assert os.listdir(tmp_path) == [] and checkpoints.last_failure is None


# Two processes save three steps. While saving step 2, one of them cannot write files of more than
# 1000 bytes.
ONE_CANNOT_WRITE = """
import resource
import sys
import time
import jax
directory, port, process, broken = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from checkpoint.config import CheckpointConfig
from checkpoint.manager import Checkpoints
from checkpoint.errors import SaveError

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, P("data", "model"))
values = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
checkpoints = Checkpoints(directory, CheckpointConfig(every_steps=1, max_to_keep=2))
for step in (1, 2, 3):
    if process == broken:
        limit = 1000 if step == 2 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    state = {"w": jax.make_array_from_callback((256, 256), sharding, lambda i: values[i] + step)}
    start = time.monotonic()
    checkpoints.save(step, state, {"position": step})
    try:
        checkpoints.wait()
    except SaveError:
        assert step == 2
    assert time.monotonic() - start < 30
    print(step, checkpoints.all_steps(), checkpoints.last_failure is not None, flush=True)
checkpoints.close()
assert checkpoints.last_failure is None
"""


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("broken", [0, 1])
def test_all_processes_continue_when_one_cannot_write(tmp_path, broken):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    directory = tmp_path / "checkpoints"
    program = textwrap.dedent(ONE_CANNOT_WRITE)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(directory), port, str(i), str(broken)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        output, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        lines = [line for line in output.splitlines() if line[:1] in "123"]
        assert lines == ["1 [1] False", "2 [1] True", "3 [1, 3] False"]
        reports = re.findall(r"Checkpoint \S+ could not be saved: .*", log)
        assert reports == [
            f"Checkpoint {directory}/2 could not be saved: process {broken}: File too large."
        ]
        assert "Traceback" not in log
    assert sorted(os.listdir(directory)) == ["1", "3"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)}
    restored = Checkpoints(directory, CONFIG).restore(wanted)
    assert restored is not None and restored[0] == 3


def test_checkpoint_that_cannot_be_published_stays_and_its_save_has_failed(tmp_path, caplog):
    published = []
    is_down = True

    def publish() -> None:
        published.append(sorted(path.name for path in (tmp_path / "checkpoints").iterdir()))
        if is_down:
            raise ConnectionError("s3://bucket/run cannot be reached")

    checkpoints = Checkpoints(tmp_path / "checkpoints", CONFIG, publish)
    checkpoints.save(1, SMALL, {})
    with pytest.raises(
        SaveError, match="checkpoint 1 is only on this machine: s3://bucket/run can"
    ):
        checkpoints.wait()
    assert errors(caplog) == [
        "Checkpoint 1 is only on this machine: s3://bucket/run cannot be reached."
    ]
    assert checkpoints.all_steps() == [1]
    is_down = False
    for step in (2, 3, 4):
        checkpoints.save(step, SMALL, {})
        checkpoints.wait()
    checkpoints.set_aside(4)
    checkpoints.close()
    # Always after the directory has changed: old checkpoints are deleted, ruined ones renamed.
    assert published == [["1"], ["1", "2"], ["2", "3"], ["3", "4"], ["3", "4.diverged"]]
    assert checkpoints.last_failure is None
