"""The kinds of faults.

Each is a function that starts a run, disturbs it at a random moment, and returns a `Hit`. It raises
`Missed` if the run finishes first, and `Broken` if the run breaks a promise.
"""

import contextlib
import math
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.layout import steps_in
from tests.faults import surroundings
from tests.faults.hits import (
    FREEZE_BOUND_S,
    IN_SAVE,
    IN_START,
    IN_STEP,
    KILL_BOUND_S,
    MOST_STEPS,
    Fault,
    Hit,
    delete,
    flip_byte,
    hit_process,
    kill,
    truncate,
)
from tests.faults.runs import CLOCK_SEED, DisturbedRun
from tests.faults.signals import in_compilation, in_save, in_start, in_step, interrupt_twice, stops
from tests.faults.storage import READ_ERRORS, READ_ERRORS_IN_1, link_file
from train.lifecycle.exit_codes import UNSAVED

CLOCK = "clock jumps"
DISK_FULL = "disk full"


def kill_in_start(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the run at a random moment before its first new step."""
    start = run.start()
    start.sleep_in_start(rng.uniform(0, run.reference.start_s))
    return kill(start)


def kill_in_step(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the run after a random number of new steps."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    return kill(start)


def kill_in_save(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the run during a save, after a random number of new steps."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS // 2))
    start.wait_until(start.is_saving, "a save")
    start.sleep(rng.uniform(0, run.reference.save_s))
    return kill(start)


def _damages(kind: str, how: Callable[[Path, random.Random], None]) -> Fault:
    """Return a fault that kills a run and damages its newest intact checkpoint."""

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start()
        start.wait_for_step(rng.randint(1, MOST_STEPS))
        # Wait until there is another intact checkpoint to fall back on.
        start.wait_until(lambda: len(_intact(run)) > 1, "a second intact checkpoint")
        kill(start)
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
    kill(start)
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
    kill(start)
    return Hit(kind=CLOCK)


def _kills_process(number: int) -> Fault:
    """Return a fault that kills one process, during start-up or after a few new steps."""

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start()
        if rng.random() < 0.4:
            start.wait_until(lambda: number in start.pids(), f"process {number}")
            start.sleep_in_start(rng.uniform(0, run.reference.start_s))
        else:
            start.wait_for_step(rng.randint(1, MOST_STEPS))
            start.sleep(rng.uniform(0, 0.1))
        noticed_s = hit_process(start, number, signal.SIGKILL, KILL_BOUND_S)
        return Hit(kind=f"kill process {number} of 2", noticed_s=noticed_s)

    return fault


def freeze(run: DisturbedRun, rng: random.Random) -> Hit:
    """Freeze one of the processes with SIGSTOP, and never resume it."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    number = rng.randrange(run.setting.num_processes)
    noticed_s = hit_process(start, number, signal.SIGSTOP, FREEZE_BOUND_S)
    return Hit(kind="freeze 1 process of 2", noticed_s=noticed_s)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, as planned.

    The hit may be of another kind: a kill that comes too late for the start-up hits a step.
    """

    fault: Fault
    share: int  # number of these faults in a campaign with --kills=100
    num_processes: int = 1  # of the runs that it disturbs


def _stop_kinds(
    *kinds: str, shares: tuple[int, int, int], hits_one: bool = False
) -> dict[str, Kind]:
    """Return three kinds: signals in the start-up, in a step and in a save."""
    moments = (in_start, in_step, in_save)
    return {
        kind: Kind(
            fault=stops(kind, moment, hits_one=hits_one, late_kind=kinds[max(1, i)]),
            share=share,
            num_processes=2 if hits_one else 1,
        )
        for i, (kind, moment, share) in enumerate(zip(kinds, moments, shares, strict=True))
    }


_TERM = (signal.SIGTERM,)

#: Name -> kind of fault. The shares of the five kinds of kills add up to 100.
KINDS = {
    IN_START: Kind(fault=kill_in_start, share=27),
    IN_STEP: Kind(fault=kill_in_step, share=30),
    IN_SAVE: Kind(fault=kill_in_save, share=27),
    "SIGTERM": Kind(fault=stops("SIGTERM", in_step, choices=_TERM), share=8),
    "SIGTERM twice": Kind(
        fault=stops("SIGTERM twice", in_step, choices=_TERM, num_signals=2), share=4
    ),
    "byte flipped": Kind(fault=_damages("byte flipped", flip_byte), share=8),
    "file truncated": Kind(fault=_damages("file truncated", truncate), share=4),
    "file deleted": Kind(fault=_damages("file deleted", delete), share=4),
    DISK_FULL: Kind(fault=fill_disk, share=6),
    CLOCK: Kind(fault=make_clock_jump, share=6),
    "log full or closed": Kind(fault=surroundings.lose_log, share=6),
    "cache damaged": Kind(fault=surroundings.damage_cache, share=8),
    "divergence": Kind(fault=surroundings.diverge, share=5),
    "SIGTERM in start-up": Kind(
        fault=stops(
            "SIGTERM in start-up",
            in_compilation,
            choices=_TERM,
            overrides=("train.compilation_cache=False",),
            late_kind="SIGTERM",
        ),
        share=6,
    ),
    "kill process 0 of 2": Kind(fault=_kills_process(0), share=8, num_processes=2),
    "kill process 1 of 2": Kind(fault=_kills_process(1), share=8, num_processes=2),
    "freeze 1 process of 2": Kind(fault=freeze, share=4, num_processes=2),
    "SIGTERM to the launcher": Kind(
        fault=stops("SIGTERM to the launcher", in_step, choices=_TERM), share=3, num_processes=2
    ),
    "launcher killed": Kind(fault=surroundings.kill_launcher, share=4, num_processes=2),
    "log full and 1 of 2 killed": Kind(
        fault=surroundings.lose_log_and_process, share=3, num_processes=2
    ),
    # The signals of the following kinds are random: SIGTERM, SIGUSR1, SIGINT or SIGHUP.
    **_stop_kinds("signal in start-up", "signal in a step", "signal in a save", shares=(8, 6, 8)),
    **_stop_kinds(
        "signal to 1 of 2 in start-up",
        "signal to 1 of 2 in a step",
        "signal to 1 of 2 in a save",
        shares=(10, 5, 6),
        hits_one=True,
    ),
    "two signals": Kind(fault=stops("two signals", in_step, num_signals=2), share=4),
    "two signals in a save": Kind(
        fault=stops("two signals in a save", in_save, num_signals=2), share=6
    ),
    "two signals to 1 of 2": Kind(
        fault=stops("two signals to 1 of 2", in_step, num_signals=2, hits_one=True),
        share=2,
        num_processes=2,
    ),
    "two signals to the launcher": Kind(
        fault=stops("two signals to the launcher", in_step, num_signals=2),
        share=2,
        num_processes=2,
    ),
    "two signals to the launcher in a save": Kind(
        fault=stops("two signals to the launcher in a save", in_save, num_signals=2),
        share=2,
        num_processes=2,
    ),
    "Ctrl-C twice": Kind(fault=interrupt_twice("Ctrl-C twice"), share=6),
    "Ctrl-C twice to the launcher": Kind(
        fault=interrupt_twice("Ctrl-C twice to the launcher"), share=2, num_processes=2
    ),
    **{kind: Kind(fault=fault, share=9) for kind, fault in READ_ERRORS.items()},
    **{
        kind: Kind(fault=fault, share=2, num_processes=2)
        for kind, fault in READ_ERRORS_IN_1.items()
    },
    "hard link": Kind(fault=link_file, share=12),
}


#: Kinds that need a library of tests/faults/storage.py, which must be compiled.
NEEDS_READ_ERRORS = (*READ_ERRORS, *READ_ERRORS_IN_1)


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
