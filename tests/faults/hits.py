"""Code that the kinds of faults share: a fault that hit, and killing, stopping, damaging a run."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint.layout import steps_in
from tests.faults.runs import GRACE_S, SAVE_TIMEOUT_S, DisturbedRun
from tests.faults.start import Attempt, Broken, Missed, is_alive
from train.lifecycle.exit_codes import FINISHED, STOPPED

#: Largest number of new steps before a fault; small enough that several faults hit each run.
MOST_STEPS = 16
#: Seconds until all processes must have exited after one is killed: the launcher's grace period,
#: and time to end the other processes.
KILL_BOUND_S = GRACE_S + 20
#: The same after a process is frozen. In addition, the watchdog needs its timeout, 2.5 intervals of
#: a quarter of that (together 1.625 × the timeout), and a few seconds.
FREEZE_BOUND_S = 1.625 * SAVE_TIMEOUT_S + 10 + KILL_BOUND_S


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A fault that hit."""

    kind: str
    noticed_s: float | None = None  # from the fault until all processes had exited; None: unknown


Fault = Callable[[DisturbedRun, random.Random], Hit]

IN_START = "kill in start-up"
IN_STEP = "kill in a step"
IN_SAVE = "kill in a save"


def kill(start: Attempt) -> Hit:
    """Kill a run, and return which of the three kinds of kills this was."""
    start.look()
    if start.process.poll() == FINISHED:
        raise Missed
    start.kill()
    if start.process.returncode != -signal.SIGKILL:
        raise Broken(
            f"before it was killed, the run exited with code {start.process.returncode}:\n"
            f"{start.tail()}"
        )
    if start.first_step_s is None:
        return Hit(kind=IN_START)
    return Hit(kind=IN_SAVE if start.is_saving() else IN_STEP)


def stop(
    run: DisturbedRun,
    start: Attempt,
    rng: random.Random,
    *names: signal.Signals,
    pid: int | None = None,
) -> None:
    """Stop a run with signals, and check its exit code and that it saved its last step.

    Args:
        start: its last start, which has logged a step.
        rng: source of the times between the signals, of at most 0.2 s.
        names: signals, of which at most one is SIGINT.
        pid: process that receives them; by default the one that was started.

    Raises:
        Missed: the run finished first.
        Broken: it exited with another code, or did not save its last step.
    """
    for name in names:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or start.process.pid, name)
        start.sleep(rng.uniform(0, 0.2))
    code = start.end()
    if code == FINISHED:
        raise Missed
    shown = " and ".join(name.name for name in names)
    if code != STOPPED:
        raise Broken(f"after {shown}, it exited with code {code}, not {STOPPED}:\n{start.tail()}")
    check_saved(run)


def check_saved(run: DisturbedRun) -> None:
    """Check that a run that was asked to stop has saved its last step.

    Raises:
        Broken: it has not.
    """
    newest = max(steps_in(run.checkpoints), default=0)
    logged = run.last_logged()
    if newest != logged:
        raise Broken(f"after a signal, step {newest} is saved, but the last step was {logged}")


def hit_process(start: Attempt, number: int, how: signal.Signals, bound_s: float) -> float:
    """Send a signal to one process of a run, and wait until all processes have exited.

    Args:
        start: start to disturb.
        number: process's number in the run.
        how: signal.
        bound_s: seconds after which all processes must have exited.

    Returns:
        Seconds from the signal until all processes and the launcher have exited.

    Raises:
        Missed: the run finished first, or the process does not exist.
        Broken: processes live too long, or outlive the launcher.
    """
    pids = start.pids()
    if start.look() == FINISHED or number not in pids:
        raise Missed
    hit_s = time.monotonic()
    os.kill(pids[number], how)
    code = start.end(bound_s)
    left = [pid for pid in pids.values() if is_alive(pid)]
    if left:
        raise Broken(f"processes {left} outlived their launcher:\n{start.tail()}")
    if code == FINISHED:
        raise Missed
    return time.monotonic() - hit_s


def flip_byte(file: Path, rng: random.Random) -> None:
    """Change one byte of a file."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randint(1, 255)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    """Cut a file off at a random position."""
    os.truncate(file, rng.randrange(file.stat().st_size))


def delete(file: Path, rng: random.Random) -> None:
    """Delete a file."""
    file.unlink()
