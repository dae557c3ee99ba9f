"""Signals to `launch.local` and to the processes that it starts."""

import os
import signal
import textwrap
import time

import pytest

from tests.launch.launcher import READY, launch, read_pids, start, wait_until_gone

#: A process that reacts to signals like a training process before its first step.
STARTING = """
def stop(number, frame):
    print(signal.Signals(number).name, flush=True)
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
"""

#: Saves for {seconds} s when it is asked to stop, and ignores all further signals.
SAVING = """
def stop(number, frame):
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    print("saving", flush=True)
    time.sleep({seconds})
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], ids=str
)
def test_run_stops_all_processes_when_the_launcher_is_stopped(tmp_path, number):
    script = f"""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for name, pid in (("helper", helper.pid), ("leader", os.getpid())):
        with open(f"{str(tmp_path)}/{{name}}{{rank}}", "w") as file:
            file.write(f"{{pid}}\\n")
    time.sleep(600)
    """
    with start(tmp_path, script, "--processes=2") as launcher:
        pids = read_pids(tmp_path, ["helper0", "leader0", "helper1", "leader1"])
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    message = f"launch.local: received {number.name}; stopping the 2 still running\n"
    assert message in errors
    wait_until_gone(pids)


def test_run_says_nothing_when_processes_have_agreed_to_stop(tmp_path):
    """They ignore SIGTERM, so the launcher may send it to those that have not ended yet."""
    script = f"""
    ready = {str(tmp_path / "ready")!r}
    if rank == 0:
        wait_for(ready)
        sys.exit(75)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(ready, "w").close()
    time.sleep(0.5)
    print("saved")
    sys.exit(75)
    """
    done = launch(tmp_path, script, "--processes=2")
    assert done.returncode == 75
    assert "[1] saved" in done.stdout and "launch.local" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 75, ""),
        (signal.SIGUSR1, 75, ""),
        # Crashes, after which the others are stopped in the same way.
        (signal.SIGKILL, 137, "process 1 killed by SIGKILL; stopping the 1 still running"),
        (signal.SIGRTMIN + 1, 163, "process 1 killed by signal 35; stopping the 1 still running"),
    ],
    ids=str,
)
def test_signal_to_one_starting_process_stops_the_others(number, code, said, tmp_path):
    with start(tmp_path, STARTING + READY, "--processes=2") as launcher:
        pids = read_pids(tmp_path, ["pid0", "pid1"])
        since = time.monotonic()
        os.kill(pids[1], number)
        output, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - since < 5
    assert launcher.returncode == code
    assert errors == (f"launch.local: {said}\n" if said else "")
    assert "SIGTERM\n" in output
    wait_until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_killed_by_a_stop_signal_is_not_restarted(number, tmp_path):
    """Before a process handles signals, they kill it. That is not a crash."""
    script = f"""
    open({str(tmp_path)!r} + f"/start{{rank}}_{{time.time()}}", "w").close()
    if rank == 1:
        wait_for({str(tmp_path / "ready")!r})
        signal.signal({int(number)}, signal.SIG_DFL)
        os.kill(os.getpid(), {int(number)})
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    open({str(tmp_path / "ready")!r}, "w").close()
    time.sleep(600)
    """
    done = launch(tmp_path, script, "--processes=2", "--max_restarts=3")
    assert done.returncode == 75
    assert done.stderr == (
        f"launch.local: process 1 killed by {number.name}; stopping the 1 still running\n"
    )
    assert len(list(tmp_path.glob("start*"))) == 2


def test_stopping_process_that_cannot_save_decides_the_exit_code(tmp_path):
    script = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(74 if rank == 0 else 75))
    if rank == 1:
        time.sleep(0.5)
        sys.exit(75)
    time.sleep(600)
    """
    done = launch(tmp_path, script, "--processes=2", "--max_restarts=3")
    assert (done.returncode, done.stderr) == (74, "")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), 75),
        ((signal.SIGINT, signal.SIGTERM), 75),
        ((signal.SIGUSR1, signal.SIGINT), 75),
        ((signal.SIGINT, signal.SIGINT), 130),
    ],
    ids=lambda value: "-".join(n.name for n in value) if isinstance(value, tuple) else str(value),
)
def test_second_signal_changes_nothing_except_a_second_ctrl_c(numbers, code, tmp_path):
    # A save that is killed must still be running then, however slow this machine is.
    saving = SAVING.format(seconds=1 if code == 75 else 600)
    with start(tmp_path, saving + READY, "--processes=2") as launcher:
        pids = read_pids(tmp_path, ["pid0", "pid1"])
        assert launcher.stdout
        launcher.send_signal(numbers[0])
        assert "saving" in launcher.stdout.readline()
        for number in numbers[1:]:
            launcher.send_signal(number)
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert output.count("saved") == (2 if code == 75 else 0)
    assert errors == (f"launch.local: received {numbers[0].name}; stopping the 2 still running\n")
    wait_until_gone(pids)


def test_signal_while_failed_processes_end_prevents_the_restart(tmp_path):
    script = f"""
    if rank == 1:
        wait_for({str(tmp_path / "pid0")!r})
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("ended"), os._exit(1)))
    """
    options = ("--processes=2", "--max_restarts=3")
    with start(tmp_path, textwrap.dedent(script) + READY, *options) as launcher:
        assert launcher.stderr
        assert "process 1 exited with code 1" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGTERM)
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert output == "ended\n"
    assert errors == "launch.local: received SIGTERM; not restarting\n"
