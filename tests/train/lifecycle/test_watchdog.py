"""The watchdog: it ends hanging processes, and reports the state of the others."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from train.lifecycle import watchdog
from train.lifecycle.exit_codes import HUNG
from train.lifecycle.phases import Phases
from train.lifecycle.watchdog import UNWATCHED, Watchdog, jax_heartbeat_timeout_s

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname()
LONG_S = 120  # nothing that a test waits for takes this long, however busy the machine is

#: `python -c PROGRAM DIRECTORY PROCESS NUM_PROCESSES PHASE TIMEOUT_S` hangs at step 17.
PROGRAM = """
import sys, time
from train.lifecycle.phases import Phases
from train.lifecycle.watchdog import Watchdog

directory, process, num_processes, phase, timeout_s = sys.argv[1:]

def wait_in_vain():
    time.sleep(600)

phases = Phases()
with phases(phase, 17):
    Watchdog(
        directory,
        phases,
        process=int(process),
        num_processes=int(num_processes),
        run_id="run",
        timeout_s=float(timeout_s),
    )
    wait_in_vain()
"""


@pytest.fixture
def start():
    """Start processes that hang; the survivors are killed after the test."""
    started = []

    def start(directory, process, num_processes, phase, timeout_s=4.0):
        arguments = (directory, process, num_processes, phase, timeout_s)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, arguments)],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def watch(tmp_path):
    """Watch this process; on a hang, `watch.hangs` is set and the process does not exit."""
    dogs = []

    def watch(phases, **options):
        defaults = {"process": 0, "num_processes": 1, "run_id": "run", "timeout_s": 0.5}
        dogs.append(
            Watchdog(
                options.pop("directory", tmp_path / "signs"),
                phases,
                on_hang=watch.hangs.set,
                **(defaults | options),
            )
        )
        return dogs[-1]

    watch.hangs = threading.Event()
    yield watch
    for dog in dogs:
        dog.close()


def wait_for(condition):
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def report_of(process):
    _, stderr = process.communicate(timeout=LONG_S)
    return stderr


def write_sign(directory, process, **changes):
    sign = {"run_id": "run", "host": f"n{process}", "pid": 100 + process, "beat": 5}
    sign |= {"step": 17, "phase": "step", "seconds": 3.0, "ended": False}
    directory.mkdir(exist_ok=True)
    (directory / f"{process}.json").write_text(json.dumps(sign | changes))


@pytest.mark.thorough
def test_waiting_process_names_killed_and_slow_processes(tmp_path, start):
    # Long enough to be killed before it notices that it hangs.
    killed = start(tmp_path, 2, 3, "data", timeout_s=4 * LONG_S)
    wait_for((tmp_path / "2.json").exists)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    slow = start(tmp_path, 1, 3, "data")
    wait_for((tmp_path / "1.json").exists)
    waiting = start(tmp_path, 0, 3, "step")

    report = report_of(waiting)
    assert waiting.returncode == HUNG
    assert re.search(
        rf"process 0 on {HOST} \(pid {waiting.pid}\) has been at step 17, in phase step for "
        r"\d+ s, longer than train\.failure_timeout_s=4;",
        report,
    )
    gone = (
        f"process 2 on {HOST} (pid {killed.pid}) is gone: its last heartbeat was at step 17, "
        "in phase"
    )
    assert f"{gone} data\n" in report
    behind = rf"process 1 on {HOST} \(pid {slow.pid}\) is behind: at step 17, in phase data for \d"
    assert re.search(behind, report)
    assert "process 1 has no heartbeat" not in report and report.count("is gone") == 1
    assert "wait_in_vain" not in report  # no stack traces, since it is not the cause

    # The slow process reports the same. Its last heartbeat shows that it was not killed.
    report = report_of(slow)
    assert slow.returncode == HUNG
    assert f"{gone} data\n" in report and report.count("is gone") == 1
    assert "no process is behind this one, and 1 ahead wait for it, such as process 0 on" in report
    assert "in wait_in_vain" in report
    assert json.loads((tmp_path / "1.json").read_text())["ended"] is True


@pytest.mark.thorough
def test_processes_at_the_same_place_show_their_stacks(tmp_path, start):
    processes = [start(tmp_path, index, 2, "step") for index in range(2)]
    for process in processes:
        report = report_of(process)
        assert process.returncode == HUNG
        assert "all 2 processes are alive and at step 17, in phase step: the step itself" in report
        assert "in wait_in_vain" in report


@pytest.mark.thorough
def test_a_single_process_shows_its_stack(tmp_path, start):
    process = start(tmp_path, 0, 1, "save", timeout_s=1)
    report = report_of(process)
    assert process.returncode == HUNG
    assert "this process is at step 17, in phase save: phase save itself hangs" in report
    assert "in wait_in_vain" in report


@pytest.mark.thorough
def test_files_of_another_start_are_ignored(tmp_path, watch, capfd):
    directory = tmp_path / "signs"
    write_sign(directory, 1, run_id="an earlier run", phase="data")
    write_sign(directory, 2, run_id="an earlier run")
    phases = Phases()
    with phases("step", 17):
        watch(phases, directory=directory, num_processes=2)
        assert watch.hangs.wait(LONG_S)
    report = capfd.readouterr().err
    assert "process 1 has no heartbeat: it has ended, or never started\n" in report
    assert "n1" not in report and "process 2" not in report


@pytest.mark.thorough
def test_broken_file_is_no_heartbeat(tmp_path, watch, capfd):
    (tmp_path / "signs").mkdir()
    for index, text in enumerate(("", "{", "[]", '{"step": 3}'), start=1):
        (tmp_path / "signs" / f"{index}.json").write_text(text)
    phases = Phases()
    with phases("step", 17):
        watch(phases, num_processes=5)
        assert watch.hangs.wait(LONG_S)
    report = capfd.readouterr().err
    assert all(f"process {index} has no heartbeat" in report for index in range(1, 5))


@pytest.mark.thorough
def test_the_report_of_thousands_of_processes_is_short(tmp_path, watch, capfd):
    for index in range(1, 1000):
        write_sign(tmp_path / "signs", index)
    phases = Phases()
    with phases("step", 17):
        watch(phases, num_processes=1000)
        assert watch.hangs.wait(LONG_S)
    report = capfd.readouterr().err
    assert report.count("is gone") == 20
    assert (
        "process 1 on n1 (pid 101) is gone: its last heartbeat was at step 17, in phase step"
        in report
    )
    assert "and 979 more\n" in report


def test_process_furthest_behind_is_named_first(tmp_path, watch, capfd):
    directory = tmp_path / "signs"
    write_sign(directory, 1, step=17, phase="data", ended=True)
    write_sign(directory, 2, step=16, phase="data", seconds=340.2, ended=True)
    write_sign(directory, 3, step=17, phase="step", ended=True)
    write_sign(directory, 4, step=17, phase="save", ended=True)
    phases = Phases()
    with phases("step", 17):
        watch(phases, directory=directory, num_processes=5)
        assert watch.hangs.wait(LONG_S)
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:] == [
        "watchdog: process 2 on n2 (pid 102) is behind: at step 16, in phase data for 340 s",
        "watchdog: process 1 on n1 (pid 101) is behind: at step 17, in phase data for 3 s",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("is_removed_later", [False, True])
def test_watchdog_that_cannot_write_reports_it_once_and_keeps_watching(
    tmp_path, watch, capfd, is_removed_later
):
    directory = tmp_path / "signs"
    if not is_removed_later:
        directory.write_text("a file where the directory should be")
    phases = Phases()
    watch(phases, directory=directory)
    if is_removed_later:
        wait_for((directory / "0.json").exists)
        directory.rename(tmp_path / "moved")
    with phases("step", 17):
        assert watch.hangs.wait(LONG_S)
    report = capfd.readouterr().err
    assert report.count("process 0 cannot write its heartbeat, but keeps watching") == 1
    assert "the step itself hangs" in report


@pytest.mark.thorough
@pytest.mark.parametrize("function", ["read_json", "write_text"])
def test_hanging_file_system_does_not_delay_the_watchdog(watch, capfd, monkeypatch, function):
    monkeypatch.setattr(watchdog, "_READ_LIMIT_S", 1.0)
    answers = threading.Event()
    monkeypatch.setattr(watchdog, function, lambda *_: answers.wait())
    phases = Phases()
    with phases("step", 17):
        dog = watch(phases, num_processes=2)
        assert watch.hangs.wait(LONG_S)
    assert "has been at step 17, in phase step for" in capfd.readouterr().err
    answers.set()
    dog.close()


@pytest.mark.parametrize("timeout_s", [0.5, 10, 600])
def test_the_watchdog_reports_before_jax_may_end_the_process(watch, timeout_s):
    dog = watch(Phases(), timeout_s=timeout_s)
    report_s = timeout_s + dog._interval_s + dog._observation_s
    assert jax_heartbeat_timeout_s(timeout_s) / 2 >= report_s + 30


@pytest.mark.thorough
def test_unwatched_phases_may_take_arbitrarily_long(watch, tmp_path, capfd):
    with contextlib.ExitStack() as stack:
        for phase in UNWATCHED:
            phases = Phases()
            stack.enter_context(phases(phase))
            watch(phases, directory=tmp_path / phase, timeout_s=0.2)
        assert not watch.hangs.wait(2)
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
def test_save_has_its_own_timeout(watch, capfd):
    phases = Phases()
    with phases("save"):
        watch(phases, timeout_s=0.2, save_timeout_s=3)
        assert not watch.hangs.wait(2)
        assert capfd.readouterr().err == ""
        assert watch.hangs.wait(LONG_S)
    assert "longer than checkpoint.timeout_s=3" in capfd.readouterr().err


@pytest.mark.thorough
def test_process_that_continues_is_not_ended(watch, capfd):
    phases = Phases()
    watch(phases, timeout_s=2)
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        with phases("step", 17):
            time.sleep(0.001)
    assert not watch.hangs.is_set()
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
def test_step_that_completes_during_the_report_does_not_end_the_process(watch, capfd):
    phases = Phases()
    seen = []

    def is_said(text):
        seen.append(capfd.readouterr().err)
        return text in "".join(seen)

    with phases("step", 17):
        watch(phases, timeout_s=1)
        wait_for(lambda: is_said("has been at step 17"))
    with phases("startup"):
        wait_for(lambda: is_said("process 0 has continued"))
        assert "hangs" not in "".join(seen)
        assert not watch.hangs.is_set()
    with phases("step", 18):
        wait_for(lambda: is_said("has been at step 18"))
        assert watch.hangs.wait(LONG_S)


@pytest.mark.thorough
def test_close_stops_watching_and_leaves_no_file(tmp_path, watch):
    phases = Phases()
    with phases("step", 17):
        dog = watch(phases)
        wait_for((tmp_path / "signs" / "0.json").exists)
        dog.close()
        assert not [thread for thread in threading.enumerate() if "watchdog" in thread.name]
        assert list((tmp_path / "signs").iterdir()) == []
        assert not watch.hangs.wait(3)


def test_heartbeat_file_contains_step_and_phase(tmp_path, watch):
    path = tmp_path / "signs" / "0.json"
    phases = Phases()
    with phases("startup", 16):
        watch(phases)
        wait_for(path.exists)
        first = json.loads(path.read_text())
        wait_for(lambda: json.loads(path.read_text())["beat"] > first["beat"])
        second = json.loads(path.read_text())
    assert (first["host"], first["pid"], first["run_id"]) == (HOST, os.getpid(), "run")
    assert (first["step"], first["phase"], first["ended"]) == (16, "startup", False)
    assert second["seconds"] > first["seconds"] >= 0


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_that_is_not_positive_is_refused(tmp_path, timeout_s):
    with pytest.raises(ValueError, match=f"timeout_s={timeout_s} must be positive; choose"):
        Watchdog(tmp_path, Phases(), process=0, num_processes=1, run_id="run", timeout_s=timeout_s)
