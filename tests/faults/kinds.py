"""The kinds of faults.

Each is a function that starts a run, disturbs it at a random moment, and returns a `Hit`. It raises
`Missed` if the run finishes first, and `Broken` if the run breaks a promise.
"""

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.layout import steps_in
from tests.faults.runs import CLOCK_SEED, GRACE_S, SAVE_TIMEOUT_S, DisturbedRun
from tests.faults.start import Attempt, Broken, Missed, is_alive
from train.lifecycle.exit_codes import FINISHED, STOPPED, UNSAVED

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
CLOCK = "clock jumps"
DISK_FULL = "disk full"


def _kill(start: Attempt) -> Hit:
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


def kill_in_start(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the run at a random moment before its first new step."""
    start = run.start()
    start.sleep(rng.uniform(0, run.reference.start_s))
    return _kill(start)


def kill_in_step(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the run after a random number of new steps."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    return _kill(start)


def kill_in_save(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the run during a save, after a random number of new steps."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS // 2))
    start.wait_until(start.is_saving, "a save")
    start.sleep(rng.uniform(0, run.reference.save_s))
    return _kill(start)


def _stop(run: DisturbedRun, rng: random.Random, num_signals: int) -> Attempt:
    """Stop a run with SIGTERM, and check its exit code and that it saved its last step."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    for i in range(num_signals):
        start.sleep(rng.uniform(0, 0.2) if i else 0.0)
        start.process.send_signal(signal.SIGTERM)
    code = start.end()
    if code == FINISHED:
        raise Missed
    if code != STOPPED:
        raise Broken(f"after SIGTERM, it exited with code {code}, not {STOPPED}:\n{start.tail()}")
    newest = max(steps_in(run.checkpoints), default=0)
    logged = run.last_logged()
    if newest != logged:
        raise Broken(f"after SIGTERM, step {newest} is saved, but the last step was {logged}")
    return start


def terminate(run: DisturbedRun, rng: random.Random) -> Hit:
    """Send SIGTERM once."""
    _stop(run, rng, 1)
    return Hit(kind="SIGTERM")


def terminate_twice(run: DisturbedRun, rng: random.Random) -> Hit:
    """Send SIGTERM twice, at most 0.2 s apart."""
    _stop(run, rng, 2)
    return Hit(kind="SIGTERM twice")


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


def _damages(kind: str, how: Callable[[Path, random.Random], None]) -> Fault:
    """Return a fault that kills a run and damages its newest intact checkpoint."""

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start()
        start.wait_for_step(rng.randint(1, MOST_STEPS))
        # Wait until there is another intact checkpoint to fall back on.
        start.wait_until(lambda: len(_intact(run)) > 1, "a second intact checkpoint")
        _kill(start)
        run.check_after_fault()
        run.damage(_intact(run)[-1], how, rng)
        return Hit(kind=kind)

    return fault


def _intact(run: DisturbedRun) -> list[int]:
    return [step for step in steps_in(run.checkpoints) if step not in run.damaged]


def fill_disk(run: DisturbedRun, rng: random.Random) -> Hit:
    """Fill the disk until a save fails, free it until a save succeeds, then kill the run."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    filler = run.directory / "filler"
    _fill(filler)
    try:
        start.wait_until(
            lambda: "could not be saved" in start.log or start.look() == UNSAVED, "a failed save"
        )
    finally:
        filler.unlink()
    if start.look() == UNSAVED:  # the save of the last step failed, so the run exited
        return Hit(kind=DISK_FULL)
    before = set(steps_in(run.checkpoints))
    start.wait_until(lambda: bool(set(steps_in(run.checkpoints)) - before), "a successful save")
    _kill(start)
    return Hit(kind=DISK_FULL)


def _fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))


def make_clock_jump(run: DisturbedRun, rng: random.Random) -> Hit:
    """Run with a jumping clock and odd modification times of checkpoint files, then kill the run.

    Access times of files in checkpoints become extreme (1970, 2038 or 2242), modification times
    random (1970 to 2106).
    """
    for path in run.checkpoints.rglob("*"):
        with contextlib.suppress(OSError):
            os.utime(path, (rng.choice((0, 1, 2**31, 2**33)), rng.uniform(0, 2**32)))
    env = {"PYTHONPATH": str(run.setting.clock), CLOCK_SEED: str(rng.getrandbits(32))}
    start = run.start(env)
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    _kill(start)
    return Hit(kind=CLOCK)


def _kills_process(number: int) -> Fault:
    """Return a fault that kills one process, during start-up or after a few new steps."""

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start()
        if rng.random() < 0.4:
            start.wait_until(lambda: number in start.pids(), f"process {number}")
            start.sleep(rng.uniform(0, run.reference.start_s))
        else:
            start.wait_for_step(rng.randint(1, MOST_STEPS))
            start.sleep(rng.uniform(0, 0.1))
        noticed_s = _hit_process(start, number, signal.SIGKILL, KILL_BOUND_S)
        return Hit(kind=f"kill process {number} of 2", noticed_s=noticed_s)

    return fault


def freeze(run: DisturbedRun, rng: random.Random) -> Hit:
    """Freeze one of the processes with SIGSTOP, and never resume it."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    number = rng.randrange(run.setting.num_processes)
    noticed_s = _hit_process(start, number, signal.SIGSTOP, FREEZE_BOUND_S)
    return Hit(kind="freeze 1 process of 2", noticed_s=noticed_s)


def _hit_process(start: Attempt, number: int, how: signal.Signals, bound_s: float) -> float:
    """Send a signal to one process of a run, and wait until all processes have exited.

    Args:
        start: the start to disturb.
        number: the process's number in the run.
        how: the signal.
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


def terminate_launcher(run: DisturbedRun, rng: random.Random) -> Hit:
    """Send SIGTERM to the launcher of a run with several processes."""
    _stop(run, rng, 1)
    return Hit(kind="SIGTERM to the launcher")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, as planned.

    The hit may be of another kind: a kill that comes too late for the start-up hits a step.
    """

    fault: Fault
    share: int  # number of these faults in a campaign with --kills=100
    num_processes: int = 1  # of the runs that it disturbs


#: Name -> kind of fault. The shares of the five kinds of kills add up to 100.
KINDS = {
    IN_START: Kind(fault=kill_in_start, share=27),
    IN_STEP: Kind(fault=kill_in_step, share=30),
    IN_SAVE: Kind(fault=kill_in_save, share=27),
    "SIGTERM": Kind(fault=terminate, share=8),
    "SIGTERM twice": Kind(fault=terminate_twice, share=4),
    "byte flipped": Kind(fault=_damages("byte flipped", flip_byte), share=8),
    "file truncated": Kind(fault=_damages("file truncated", truncate), share=4),
    "file deleted": Kind(fault=_damages("file deleted", delete), share=4),
    DISK_FULL: Kind(fault=fill_disk, share=6),
    CLOCK: Kind(fault=make_clock_jump, share=6),
    "kill process 0 of 2": Kind(fault=_kills_process(0), share=8, num_processes=2),
    "kill process 1 of 2": Kind(fault=_kills_process(1), share=8, num_processes=2),
    "freeze 1 process of 2": Kind(fault=freeze, share=4, num_processes=2),
    "SIGTERM to the launcher": Kind(fault=terminate_launcher, share=3, num_processes=2),
}


def draw(kinds: Sequence[str], num_kills: int, rng: random.Random) -> list[str]:
    """Draw the faults of a campaign.

    Args:
        kinds: keys of KINDS.
        num_kills: number of kills at random moments, if all kinds of kills are included.
        rng: source of the order.

    Returns:
        Names of faults in random order, in proportion to their shares, at least one of each kind.
    """
    names = [name for name in kinds for _ in range(math.ceil(KINDS[name].share * num_kills / 100))]
    rng.shuffle(names)
    return names
