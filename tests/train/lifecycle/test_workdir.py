"""The workdir of a run: its lock, and the checks that all processes share it and agree."""

import logging
import os
import subprocess
import sys

import pytest

from distributed.messages import Exchange, may_pass
from tests.runs import CONFIG, ROOT, TINY, make_run, write_corpus
from train.lifecycle.exit_codes import FAILED, REFUSED
from train.lifecycle.workdir import planned_memory
from train.lifecycle.workdir_lock import LOCK_FILE, lock
from train.main import main

pytestmark = pytest.mark.drawn(2, among="thorough")

HOLDS = """
import sys, time
from pathlib import Path
from train.lifecycle.workdir_lock import lock
with lock(Path(sys.argv[1]), timeout_s=1):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_second_run_waits_and_its_error_names_the_holder(
    holder, corpus_overrides, tmp_path, capsys
):
    overrides = (*TINY, *corpus_overrides, "train.start_timeout_s=1")
    arguments = [f"--config.{override}" for override in overrides]
    before = sorted(tmp_path.rglob("*"))
    # FAILED, not REFUSED: another start can succeed after the other run has ended.
    assert main([f"--config={CONFIG}", f"--workdir={tmp_path}", *arguments]) == FAILED
    said = f"--workdir={tmp_path} is in use by process {holder.pid} on "
    error = capsys.readouterr().err
    assert f"{said}" in error and "after 1 s; wait until that run ends, or choose" in error
    assert error.count(f"{said}{os.uname().nodename}: waiting\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "memory, message",
    [
        ("{foo: 1}", r"config\.yaml: memory\.foo: unknown key"),
        ("{device_budget: [1]}", r"memory\.device_budget=\(1,\) must be of type float or None"),
        ("3", r"config\.yaml must contain sections of keys, .* but memory is 3"),
    ],
)
def test_planned_memory_of_an_edited_config_is_checked(memory, message, tmp_path):
    (tmp_path / "config.yaml").write_text(f"memory: {memory}\n")
    with pytest.raises(ValueError, match=message):
        planned_memory(tmp_path)


@pytest.mark.thorough
def test_run_starts_as_soon_as_the_lock_is_released(holder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        holder.kill()  # its lock file stays
        with lock(tmp_path, timeout_s=60) as first:
            assert (tmp_path / LOCK_FILE).read_text() == first
    assert not (tmp_path / LOCK_FILE).exists()
    with lock(tmp_path, timeout_s=0) as second:
        assert second != first
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.thorough
def test_only_one_process_at_a_time_holds_the_lock(tmp_path):
    """Several processes increment a counter without atomicity; the lock makes the sum right."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    program = """
import sys, time
from pathlib import Path
from train.lifecycle.workdir_lock import lock
counter = Path(sys.argv[1]) / "counter"
for _ in range(5):
    with lock(counter.parent, timeout_s=120):
        value = int(counter.read_text())
        time.sleep(0.02)
        counter.write_text(str(value + 1))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert counter.read_text() == "15"


def test_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with lock(tmp_path, timeout_s=0):
        assert (tmp_path / LOCK_FILE).exists()
    assert "cannot be locked" in caplog.text and "do not start a second run there" in caplog.text


def of_two(tmp_path, overrides, workdir: str, setup: str = "") -> subprocess.CompletedProcess:
    """Run two processes; $ID in the arguments is replaced by the process index.

    Args:
        tmp_path: directory for a script.
        overrides: overrides of both processes.
        workdir: their workdir.
        setup: shell commands that each process runs first.
    """
    train = [f"--config={CONFIG}", f"--workdir={workdir}"]
    train += [f"--config.{override}" for override in overrides]
    script = tmp_path / "train.sh"
    words = " ".join(f'"{word}"' for word in train)
    run = f"exec {sys.executable} -m train.main {words}"
    script.write_text(f"ID=$TAIBAI_PROCESS_ID\n{setup}\n{run}\n")
    launch = ("-m", "launch.local", "--processes=2", "--devices_per_process=1", "--grace_s=20")
    return subprocess.run(
        [sys.executable, *launch, "--", "bash", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_workdir_that_is_not_shared_is_rejected_by_all_processes(corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides, "mesh.data=2")
    done = of_two(tmp_path, overrides, f"{tmp_path}/run_$ID")
    assert done.returncode == REFUSED, done.stderr
    said = "is not the same directory on all processes (process 1: it is not there)"
    assert done.stderr.count(said) == 2, done.stderr
    assert "choose a directory on a file system that all hosts share" in done.stderr


@pytest.mark.thorough
def test_missing_text_of_one_process_is_reported_by_all(corpus_overrides, tmp_path):
    paths, *others = corpus_overrides
    there = paths.removeprefix("data.paths=").removesuffix("/*.txt")
    (tmp_path / "text_0").symlink_to(there)
    overrides = (*TINY, *others, f"data.paths={tmp_path}/text_$ID/*.txt", "mesh.data=2")
    done = of_two(tmp_path, overrides, f"{tmp_path}/run")
    assert done.returncode == REFUSED, done.stderr
    said = f"data.paths: no file matches '{tmp_path}/text_1/*.txt'"
    assert f"error: process 1: {said}" in done.stderr
    assert f"[1] error: {said}" in done.stderr
    assert "Check failure" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_process_with_another_config_is_reported_by_all(corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides, "mesh.data=2", "log.every_steps=1$ID")
    done = of_two(tmp_path, overrides, f"{tmp_path}/run")
    assert done.returncode == REFUSED, done.stderr
    said = "error: process 1: its config differs from process 0; start all processes with the same"
    assert done.stderr.count(said) == 2, done.stderr


@pytest.mark.thorough
def test_processes_with_different_cached_tokens_are_refused_by_all(tmp_path, monkeypatch):
    """Both caches are intact and have the same key: the text kept its size and its times."""
    paths, _ = write_corpus(tmp_path)
    overrides = (*TINY, paths, "mesh.data=2")
    file = tmp_path / "part_3.txt"
    for process in (0, 1):
        monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache_{process}")
        make_run((*TINY, paths))
        status = file.stat()
        file.write_text(file.read_text().replace("e", "E"))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    keys = [{path.name for path in tmp_path.glob(f"cache_{i}/taibai/tokens-*")} for i in (0, 1)]
    assert keys[0] == keys[1] != set()
    setup = f"export XDG_CACHE_HOME={tmp_path}/cache_$ID"
    done = of_two(tmp_path, overrides, f"{tmp_path}/run", setup)
    assert done.returncode == REFUSED, done.stderr
    said = "error: process 1: its data differs from process 0; start all processes with the same"
    assert done.stderr.count(said) == 2, done.stderr


def test_exchange_of_one_process_raises_the_error_of_its_action():
    exchange = Exchange()
    assert exchange.on_all(lambda: 3) == exchange.on_first(lambda: 3) == 3

    def fail():
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        exchange.on_all(fail)


@pytest.mark.parametrize(
    "error, may",
    [(None, False), (ValueError(), False), (FileNotFoundError(), False), (TimeoutError(), True)],
)
def test_may_pass_is_true_for_temporary_errors_only(error, may):
    assert may_pass(error) == may
