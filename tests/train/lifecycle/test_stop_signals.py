"""Signals, and dead or hanging processes: how a run ends and resumes with unchanged losses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.runs import ROOT, TINY, arguments
from tests.train.test_resume import command
from train.lifecycle.exit_codes import FINISHED, HUNG, STOPPED
from train.lifecycle.stop_signals import StopSignals
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_steps")

STEPS = 60
SMALL = (*TINY, f"train.num_steps={STEPS}", "checkpoint.every_steps=20", "eval.every_steps=25")
#: Both processes are in one group of gradients; a pipeline would take longer to compile.
RUN = (*SMALL, "mesh.data=8")


@pytest.fixture(scope="module")
def overrides(corpus_overrides):
    return (*RUN, *corpus_overrides, "train.failure_timeout_s=10")


@pytest.fixture(scope="module")
def undisturbed(overrides, tmp_path_factory):
    """The log of an undisturbed run in this process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert main(arguments(workdir, overrides)) == FINISHED
    return entries(workdir)


def entries(workdir: Path) -> list[tuple]:
    """Return (step, loss or None, eval loss or None) for every line of the metrics file."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return [(line["step"], line.get("loss"), line.get("eval_loss")) for line in lines]


def start(command, **variables) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, workdir: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    path = workdir / "metrics.jsonl"
    while not (path.exists() and any(m["step"] >= step for m in read_metrics(path))):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)


def of_two(workdir: Path, overrides, *options: str) -> list[str]:
    """Return the command line of the same run in two processes."""
    launch = ("-m", "launch.local", "--processes=2", "--devices_per_process=4", *options)
    return [sys.executable, *launch, "--", *command(workdir, overrides)]


def processes(launcher: subprocess.Popen) -> list[int]:
    """Return the process ids of the launcher's children, in order."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children]


@pytest.mark.thorough
def test_signals_save_once_and_the_next_start_resumes(corpus_overrides, tmp_path):
    # A signal long before the first checkpoint, however late this process sends it.
    overrides = (*SMALL, *corpus_overrides, "checkpoint.every_steps=40")
    undisturbed = tmp_path / "undisturbed"
    assert main(arguments(undisturbed, overrides)) == FINISHED
    workdir = tmp_path / "run"
    process = start(command(workdir, overrides))
    wait_for_step(process, workdir, 5)
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:  # until the process has ended
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.002)
    output, _ = process.communicate(timeout=1)
    assert process.returncode == STOPPED, output
    assert "finishing this step, saving, and stopping" in output
    (saved,) = (workdir / "checkpoints").iterdir()
    last, *_ = entries(workdir)[-1]
    assert int(saved.name) == last < 40
    assert main(arguments(workdir, overrides)) == FINISHED
    assert entries(workdir) == entries(undisturbed)


@pytest.mark.thorough
def test_signal_before_the_first_step_is_a_preemption(corpus_overrides, tmp_path):
    process = start(command(tmp_path, (*SMALL, *corpus_overrides)))
    assert process.stdout
    while "model   GPT2" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, output
    assert output.endswith("SIGINT: stopping now, as there is nothing to save yet\n")
    assert "Traceback" not in output
    assert time.monotonic() - sent < 5, "the signal waited for the compiler"
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_signal_to_one_process_stops_all_and_all_restart_when_one_is_killed(
    overrides, undisturbed, tmp_path
):
    launcher = start(of_two(tmp_path, overrides))
    wait_for_step(launcher, tmp_path, 5)
    os.kill(processes(launcher)[1], signal.SIGTERM)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == STOPPED, output
    assert entries(tmp_path)[-1][0] < 20
    launcher = start(of_two(tmp_path, overrides, "--max_restarts=1"))
    wait_for_step(launcher, tmp_path, 25)
    os.kill(processes(launcher)[0], signal.SIGKILL)  # the coordinator
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    assert "killed by SIGKILL" in output and "launch.local: restarting" in output
    assert "step 20 of train.num_steps=60 is saved; resuming from there" in output
    check_equal(tmp_path, undisturbed)


def check_equal(workdir: Path, undisturbed: list[tuple]) -> None:
    """Compare up to rounding: two processes sum in another order than one."""
    found = entries(workdir)
    expected = undisturbed
    assert [line[0] for line in found] == [line[0] for line in expected]
    for column in (1, 2):
        values = [[line[column] or 0.0 for line in lines] for lines in (found, expected)]
        np.testing.assert_allclose(*values, rtol=1e-4)


SLOW_START = """
import sys, time
import jax
from train import main, preparation
restore_or_initialize = preparation.restore_or_initialize
def slow(*args):
    time.sleep(18 * jax.process_index())
    return restore_or_initialize(*args)
preparation.restore_or_initialize = slow
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_hanging_process_is_named_and_the_others_exit(overrides, tmp_path):
    """A process that starts after the others by more than failure_timeout_s does not hang."""
    launch = of_two(tmp_path, (*overrides, "train.num_steps=100000"), "--grace_s=2")
    program = launch.index("train.main")
    launch[program - 1 : program + 1] = "-c", SLOW_START
    launcher = start(launch)
    wait_for_step(launcher, tmp_path, 5)
    stopped = processes(launcher)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        since = time.monotonic()
        output, _ = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == HUNG, output
    assert time.monotonic() - since < 90
    assert f"process 1 on {os.uname().nodename} (pid {stopped}) is gone" in output
    assert "in phase step" in output


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.slow(only=["1"])
@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
def test_process_with_a_full_log_ends_when_its_peer_is_killed(killed, overrides, tmp_path):
    """There is no launcher, which would end both: an error in printing must not delay the end."""
    shared = {
        "TAIBAI_COORDINATOR": f"unix:{tmp_path}/socket",
        "TAIBAI_NUM_PROCESSES": "2",
        "TAIBAI_DEVICES_PER_PROCESS": "4",
        "TAIBAI_SECRET": "of this test",
    }
    both = []
    try:
        with open("/dev/full", "wb") as full:
            for number in range(2):
                both.append(
                    subprocess.Popen(
                        command(tmp_path, (*overrides, "train.num_steps=100000")),
                        cwd=ROOT,
                        env={**os.environ, **shared, "TAIBAI_PROCESS_ID": str(number)},
                        stdout=full,
                        stderr=full,
                    )
                )
        wait_for_step(both[0], tmp_path, 5)
        both[killed].kill()
        # The watchdog would end it after 1.625 × failure_timeout_s, jax after 47 to 95 s.
        assert both[1 - killed].wait(timeout=60) != 0
    finally:
        for process in both:
            process.kill()
            process.wait()


def watching(before: str = "", after: str = "", *, is_ready: bool = True) -> subprocess.Popen:
    """Start a program that watches for signals, and return once it does so."""
    code = f"""
import hashlib, signal, sys
from pathlib import Path
from train.lifecycle.stop_signals import StopSignals
{before}
signals = StopSignals()
signals.watch()
{after}
print("ready", flush=True)
# Handlers in Python do not run before this function returns, in about a minute.
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and (not is_ready or process.stdout.readline() == "ready\n")
    return process


@pytest.mark.parametrize(
    "name", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP], ids=str
)
def test_signal_with_nothing_to_save_ends_a_busy_process_at_once(name):
    process = watching()
    process.send_signal(name)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == STOPPED
    assert errors == f"{name.name}: stopping now, as there is nothing to save yet\n"


def test_second_ctrl_c_ends_a_busy_process_without_saving():
    process = watching(after="signals.defer()")
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(name)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.endswith("SIGINT again: stopping now, without saving\n")
    assert "Traceback" not in errors


def test_handlers_of_a_library_that_was_loaded_meanwhile_are_replaced():
    other = "signal.signal(signal.SIGTERM, lambda *_: None)"
    after = f"{other}\nsignals.defer()\nsignal.raise_signal(signal.SIGTERM)"
    process = watching(after=f"{after}\nif signals.has_received: sys.exit(3)", is_ready=False)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3, errors


def test_signal_with_nothing_to_save_removes_the_temporary_directory(tmp_path):
    (tmp_path / "scratch" / "folder").mkdir(parents=True)
    process = watching(after=f"signals.remove_at_exit(Path({str(tmp_path / 'scratch')!r}))")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == STOPPED
    assert list(tmp_path.iterdir()) == []


def test_hangup_under_nohup_is_ignored():
    process = watching(before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == STOPPED


def test_ctrl_c_while_modules_are_loading_is_one_line():
    process = start([sys.executable, "-m", "train.main", "--config=none.py"])
    status = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + 60
    # A bit of SigCgt for each signal that the process handles.
    while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> 9 & 1:
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED
    assert output == "SIGINT: stopping now, as there is nothing to save yet\n"


def test_handlers_are_restored_and_a_second_interrupt_ends_immediately():
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        assert signal.getsignal(signal.SIGINT) == before
        signals.defer()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
