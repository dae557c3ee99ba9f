"""Starts `launch.local` with small scripts instead of training processes."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# Prepended to every script that these tests launch; `rank` is the process number.
PROLOGUE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["TAIBAI_PROCESS_ID"])
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""
#: The end of a script: says that the process handles signals now, and waits for them.
READY = """
with open(os.path.join(os.path.dirname(sys.argv[0]), f"pid{rank}"), "w") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


def command(tmp_path, script, *options):
    """Return the launcher's command line for a script."""
    path = tmp_path / "child.py"
    path.write_text(PROLOGUE + textwrap.dedent(script))
    start = [sys.executable, "-m", "launch.local", *options]
    return [*start, "--", "python", str(path)]


def variables(**changes):
    """Return this process's environment, cleared of variables that affect the launcher."""
    steering = ("TAIBAI_", "XLA_", "PYTHONUNBUFFERED")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(steering)}
    return clean | {"JAX_PLATFORMS": "cpu"} | changes


def launch(tmp_path, script, *options, **changes):
    return subprocess.run(
        command(tmp_path, script, *options),
        cwd=REPOSITORY,
        env=variables(**changes),
        capture_output=True,
        text=True,
        timeout=120,
    )


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that has ended remains a zombie until its new parent waits for it.
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def read_pids(tmp_path, names):
    """Wait until the children have written their process ids to files, and return them."""
    deadline = time.monotonic() + 30
    paths = [tmp_path / name for name in names]
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        assert time.monotonic() < deadline, f"no {names} in {list(tmp_path.iterdir())}"
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


@contextlib.contextmanager
def start(tmp_path, script, *options) -> Iterator[subprocess.Popen[str]]:
    """Start the launcher, and kill it at the end of the block; its processes die with it."""
    with subprocess.Popen(
        command(tmp_path, script, *options),
        cwd=REPOSITORY,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()
