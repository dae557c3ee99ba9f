"""Faults in the environment of a run: its log, its launcher, its caches, and its settings."""

import os
import random
import signal
import time

from checkpoint.layout import steps_in
from tests.faults.hits import (
    KILL_BOUND_S,
    MOST_STEPS,
    Hit,
    delete,
    flip_byte,
    hit_process,
    kill,
    stop,
    truncate,
)
from tests.faults.runs import DisturbedRun
from tests.faults.start import Broken, Missed, is_alive
from train.lifecycle.exit_codes import DIVERGED

#: A device on which every write fails as on a full disk.
FULL_DEVICE = "/dev/full"
#: Seconds until all processes must have exited after their launcher is killed.
LAUNCHER_BOUND_S = 5.0
#: Steps that must be left for a divergence to be noticed: its first step, and those after it.
DIVERGING_STEPS = 10


def lose_log(run: DisturbedRun, rng: random.Random) -> Hit:
    """Log to a full disk, or to a pipe whose reader is gone; then send SIGTERM."""
    if rng.random() < 0.5:
        with open(FULL_DEVICE, "wb") as full:
            start = run.start(output=full.fileno())
        start.wait_for_step(rng.randint(1, MOST_STEPS))
    else:
        reader, writer = os.pipe()
        start = run.start(output=writer)
        os.close(writer)
        try:
            start.wait_for_step(rng.randint(1, MOST_STEPS))
        finally:
            os.close(reader)
        start.sleep(rng.uniform(0, 0.2))
    stop(run, start, rng, signal.SIGTERM)
    return Hit(kind="log full or closed")


def lose_log_and_process(run: DisturbedRun, rng: random.Random) -> Hit:
    """Log to a full disk, and kill one of two processes: the other must end as well."""
    with open(FULL_DEVICE, "wb") as full:
        start = run.start(output=full.fileno())
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    noticed_s = hit_process(start, rng.randrange(2), signal.SIGKILL, KILL_BOUND_S)
    return Hit(kind="log full and 1 of 2 killed", noticed_s=noticed_s)


def kill_launcher(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill the launcher, in start-up or after a few new steps: its processes must end at once."""
    start = run.start()
    if rng.random() < 0.4:
        start.sleep_in_start(rng.uniform(0, run.reference.start_s))
    else:
        start.wait_for_step(rng.randint(1, MOST_STEPS))
    pids = start.pids().values()
    hit_s = time.monotonic()
    start.process.kill()
    if start.process.wait() != -signal.SIGKILL:
        raise Missed
    while left := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() - hit_s > LAUNCHER_BOUND_S:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise Broken(f"processes {left} outlived their launcher:\n{start.tail()}")
        time.sleep(0.002)
    start.look()
    return Hit(kind="launcher killed", noticed_s=time.monotonic() - hit_s)


def damage_cache(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kill a run, and damage a cached file: tokens, or a compiled program."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    kill(start)
    cached = [path for path in run.setting.cache.rglob("*") if path.is_file()]
    file = rng.choice(sorted(path for path in cached if path.stat().st_size))
    rng.choice((flip_byte, truncate, delete))(file, rng)
    return Hit(kind="cache damaged")


def diverge(run: DisturbedRun, rng: random.Random) -> Hit:
    """Start the run once with a learning rate that ruins the parameters."""
    newest = max(steps_in(run.checkpoints), default=0)
    if newest + DIVERGING_STEPS > run.setting.num_steps:
        run.finish()
        raise Missed
    num_bad = rng.randint(1, DIVERGING_STEPS // 2)
    start = run.start(None, "optimizer.learning_rate=1e30", f"train.max_nonfinite_steps={num_bad}")
    code = start.end()
    if code != DIVERGED:
        raise Broken(f"with a ruinous learning rate, it exited with code {code}:\n{start.tail()}")
    return Hit(kind="divergence")
