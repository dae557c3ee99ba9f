"""How `launch/train.sbatch` reacts to exit codes and to USR1, with programs in place of SLURM's."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.runs import ROOT

SLEEP = """#!/bin/bash
echo "$1" >>sleeps
exec /bin/sleep 0.5
"""
#: It fails, so that the script ends instead of waiting for its end.
SCONTROL = """#!/bin/bash
echo "$1 $2" >>scontrol_calls
exit 1
"""
#: The first call is too early: the processes are not registered yet.
SCANCEL = """#!/bin/bash
echo "$1 $2" >>scancel_calls
if (($(wc -l <scancel_calls) > 1)); then kill -TERM "$(cat srun_pid)"; fi
"""


def start(tmp_path: Path, srun: str, **variables: str) -> subprocess.Popen:
    """Start the script; each `srun` adds a line to the file `starts`, and runs the given text."""
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {"sleep": SLEEP, "scontrol": SCONTROL, "scancel": SCANCEL}
    texts["srun"] = f"#!/bin/bash\necho $$ >srun_pid\necho >>starts\n{srun}\n"
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host"}
    return subprocess.Popen(
        ["bash", str(ROOT / "launch" / "train.sbatch")],
        env=os.environ | variables | {"PATH": f"{programs}:{os.environ['PATH']}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(script: subprocess.Popen) -> str:
    """Wait for the end of the script and return its output; kill all that is left of it."""
    try:
        return script.communicate(timeout=10)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.01)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("ends", "starts", "is_requeued"),
    [
        *((f"exit {code}", 1, False) for code in (0, 2, 70, 74)),
        ("exit 75", 1, True),
        *((f"kill -{name} $$", 1, True) for name in ("TERM", "USR1", "INT", "HUP")),
        ("exit 76", 3, False),
        ("kill -KILL $$", 3, False),
    ],
)
def test_exit_code_decides_whether_the_job_is_requeued(ends, starts, is_requeued, tmp_path):
    """A process that a signal kills has not handled signals yet, so it counts as stopped."""
    script = start(tmp_path, ends, TAIBAI_MAX_FAILURES="2")
    output = finish(script)
    assert num_lines(tmp_path / "starts") == starts, output
    assert num_lines(tmp_path / "scontrol_calls") == is_requeued, output
    assert script.returncode != 0 or ends == "exit 0"


@pytest.mark.parametrize("num_signals", [1, 3])
def test_usr1_stops_processes_that_are_still_being_started(num_signals, tmp_path):
    """The first scancel finds no processes, so the script calls it again."""
    script = start(tmp_path, "trap 'exit 75' TERM; touch ready; while :; do /bin/sleep 0.1; done")
    wait_for(tmp_path / "ready")
    for _ in range(num_signals):
        script.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
    assert "stopped with code 75; requeueing the job" in finish(script)
    assert script.returncode == 75
    assert set((tmp_path / "scancel_calls").read_text().splitlines()) == {"--signal=TERM 7"}
    assert (tmp_path / "scontrol_calls").read_text() == "requeue 7\n"
    assert num_lines(tmp_path / "starts") == 1


def test_usr1_between_two_starts_requeues_the_job(tmp_path):
    script = start(tmp_path, "exit 1")
    wait_for(tmp_path / "sleeps")
    script.send_signal(signal.SIGUSR1)
    output = finish(script)
    assert "failed with code 1; restarting" in output
    assert output.endswith("taibai: stopped with code 1; requeueing the job\n")
    assert num_lines(tmp_path / "starts") == 1
