"""Faults that ask a run to stop: with any signal, at any moment, all processes or only one."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence

from tests.faults.hits import MOST_STEPS, Fault, Hit, check_saved, stop
from tests.faults.runs import GRACE_S, DisturbedRun
from tests.faults.start import Attempt, Broken, Missed
from train.lifecycle.exit_codes import FINISHED, STOPPED
from train.lifecycle.stop_signals import SIGNALS, heeded_signals

#: Seconds in which a run must react to a signal while it starts.
SIGNAL_BOUND_S = 15.0
#: Seconds in which it must react to a second Ctrl-C.
INTERRUPT_BOUND_S = 5.0

#: Waits for the moment of a fault.
Moment = Callable[[DisturbedRun, Attempt, random.Random], None]


def in_start(run: DisturbedRun, start: Attempt, rng: random.Random) -> None:
    """Wait for a random moment before the first new step."""
    start.sleep_in_start(rng.uniform(0, run.reference.start_s))


def in_compilation(run: DisturbedRun, start: Attempt, rng: random.Random) -> None:
    """Wait for a random moment between the first line of the log and the first new step."""
    start.wait_until(lambda: "model   GPT2" in start.log, "the name of the model")
    start.sleep_in_start(rng.uniform(0, run.reference.start_s))


def in_step(run: DisturbedRun, start: Attempt, rng: random.Random) -> None:
    """Wait for a random number of new steps."""
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))


def in_save(run: DisturbedRun, start: Attempt, rng: random.Random) -> None:
    """Wait for a random moment of a save, after a random number of new steps."""
    start.wait_for_step(rng.randint(1, MOST_STEPS // 2))
    start.wait_until(start.is_saving, "a save")
    start.sleep(rng.uniform(0, run.reference.save_s))


def stops(
    kind: str,
    moment: Moment,
    *,
    choices: Sequence[signal.Signals] = SIGNALS,
    num_signals: int = 1,
    hits_one: bool = False,
    overrides: Sequence[str] = (),
    late_kind: str | None = None,
) -> Fault:
    """Return a fault that sends random signals, of which at most one is SIGINT.

    Args:
        kind: name of the fault.
        moment: waits for the moment of the first signal.
        choices: signals to choose from.
        num_signals: number of signals, at most 0.2 s apart.
        hits_one: whether to send them to one process of several, instead of the launcher.
        overrides: additional overrides of the config for this start.
        late_kind: name of the fault if a signal that was meant for the start-up hits a step.
    """

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start(None, *overrides)
        number = rng.randrange(run.setting.num_processes) if hits_one else None
        if number is not None:
            start.wait_until(lambda: number in start.pids(), f"process {number}")
        moment(run, start, rng)
        heeded = [name for name in choices if name in heeded_signals()]  # not SIGHUP under nohup
        names = [rng.choice(heeded)]
        while len(names) < num_signals:
            names.append(rng.choice([name for name in heeded if name != signal.SIGINT]))
        pid = start.process.pid if number is None else start.pids().get(number)
        if start.look() == FINISHED or pid is None:
            raise Missed
        if start.first_step_s is not None:
            stop(run, start, rng, *names, pid=pid)
            return Hit(kind=late_kind or kind)
        return Hit(kind=kind, noticed_s=_stop_start(run, start, pid, names))

    return fault


def _stop_start(
    run: DisturbedRun, start: Attempt, pid: int, names: Sequence[signal.Signals]
) -> float:
    """Stop a run before its first step; return the seconds until all processes had exited."""
    hit_s = time.monotonic()
    for name in names:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, name)
    # A process that waits in its first step for one that was stopped in start-up is killed.
    bound_s = SIGNAL_BOUND_S + (GRACE_S if run.setting.num_processes > 1 else 0)
    code = start.end(bound_s)
    if code == FINISHED:
        raise Missed
    # Until a process handles signals, they kill it.
    if code not in (STOPPED, *(-name for name in names), *(128 + name for name in names)):
        shown = " and ".join(name.name for name in names)
        raise Broken(f"{shown} in start-up ended it with code {code}:\n{start.tail()}")
    if start.step() > 0:
        check_saved(run)
    return time.monotonic() - hit_s


def interrupt_twice(kind: str) -> Fault:
    """Return a fault that presses Ctrl-C twice: the run must end quickly, saved or not."""

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start()
        rng.choice((in_start, in_step, in_save))(run, start, rng)
        if start.look() == FINISHED:
            raise Missed
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                start.process.send_signal(signal.SIGINT)
            start.sleep(rng.uniform(0, 0.2))
        hit_s = time.monotonic()
        code = start.end(INTERRUPT_BOUND_S)
        if code == FINISHED:
            raise Missed
        if code not in (STOPPED, -signal.SIGINT, 128 + signal.SIGINT):
            raise Broken(f"Ctrl-C twice ended it with code {code}:\n{start.tail()}")
        if start.has_log and "Traceback" in start.log:
            raise Broken(f"Ctrl-C twice ended it with a traceback:\n{start.tail()}")
        return Hit(kind=kind, noticed_s=time.monotonic() - hit_s)

    return fault
