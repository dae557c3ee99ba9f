"""Disturbs small runs in many ways, and compares each with an undisturbed one, to the bit.

    python -m benchmarks.faults --kills=100 --out=benchmarks/results/cpu_faults.json

A tiny GPT-2 with dropout trains on a simulated mesh of 2×2×2, in one process and in two. Of its
faults each is drawn at random, with a moment of its own: kills, signals, frozen processes, damaged
checkpoints, a full disk, a clock that jumps. After each the same command starts the run again,
until it comes to its last step. Then these must hold, or the exit code is 1 and the run's
directory is kept:

- losses, gradient norms and evaluations are those of the undisturbed run, each logged once;
- whatever checkpoint passes for intact loads, and is that of the undisturbed run;
- a kill leaves no damaged checkpoint, and the end of a run nothing half-written;
- the exit codes are those of train/exit_codes.py, and nothing outlives its launcher.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks import report
from benchmarks.fault_runs import (
    CLOCK_SEED,
    FAILURE_TIMEOUT_S,
    GRACE_S,
    MESH,
    NUM_STEPS,
    OVERRIDES,
    Broken,
    DisturbedRun,
    Missed,
    Reference,
    Setting,
    Start,
    compare,
    is_alive,
    load,
    prepare,
    trajectory,
)
from checkpoint.layout import steps_in
from sharding import devices
from train.exit_codes import FINISHED, STOPPED, UNSAVED

FAULTS_PER_RUN = 5
#: Most steps from the first new one to a fault; each run has time for FAULTS_PER_RUN of them.
MOST_STEPS = 16
#: After a process was killed: the launcher's grace, and time to collect what is left.
KILL_BOUND_S = GRACE_S + 20
#: After one was frozen: the watchdog's time-out, 2.5 intervals and a few seconds, and the same.
FREEZE_BOUND_S = 1.625 * FAILURE_TIMEOUT_S + 10 + KILL_BOUND_S
TMPFS_BYTES = 64 * 2**20
NUM_OVERHEAD_ROUNDS = 3

# The faults. Each starts the run, disturbs it, and returns what it hit and what was noticed when.


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A fault that hit."""

    kind: str
    noticed_s: float | None = None  # until the others had noticed, and all were gone


Fault = Callable[[DisturbedRun, random.Random], Hit]

IN_START, IN_STEP, IN_SAVE = "kill in start-up", "kill in a step", "kill in a save"
CLOCK, DISK_FULL = "clock jumps", "disk full"


def _kill(start: Start) -> Hit:
    start.look()
    if start.process.poll() == FINISHED:
        raise Missed
    start.kill()
    if start.process.returncode != -signal.SIGKILL:
        raise Broken(f"it ended with code {start.process.returncode} by itself:\n{start.tail()}")
    if start.first_step_s is None:
        return Hit(kind=IN_START)
    return Hit(kind=IN_SAVE if start.is_saving() else IN_STEP)


def kill_in_start(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kills it at some moment before its first new step."""
    start = run.start()
    start.sleep(rng.uniform(0, run.reference.start_s))
    return _kill(start)


def kill_in_step(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kills it some steps later."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    return _kill(start)


def kill_in_save(run: DisturbedRun, rng: random.Random) -> Hit:
    """Kills it some steps later, in the midst of a save."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS // 2))
    start.wait_until(start.is_saving, "a save")
    start.sleep(rng.uniform(0, run.reference.save_s))
    return _kill(start)


def _stop(run: DisturbedRun, rng: random.Random, num_signals: int) -> Start:
    """Ends it with SIGTERM, and checks that it saved and said so."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    for i in range(num_signals):
        start.sleep(rng.uniform(0, 0.2) if i else 0.0)
        start.process.send_signal(signal.SIGTERM)
    code = start.end()
    if code == FINISHED:
        raise Missed
    if code != STOPPED:
        raise Broken(f"after SIGTERM it ended with code {code}, not {STOPPED}:\n{start.tail()}")
    newest, logged = max(steps_in(run.checkpoints), default=0), run.last_logged()
    if newest != logged:
        raise Broken(f"after SIGTERM step {newest} is saved, and step {logged} was the last one")
    return start


def terminate(run: DisturbedRun, rng: random.Random) -> Hit:
    """Sends SIGTERM."""
    _stop(run, rng, 1)
    return Hit(kind="SIGTERM")


def terminate_twice(run: DisturbedRun, rng: random.Random) -> Hit:
    """Sends SIGTERM, and at once again."""
    _stop(run, rng, 2)
    return Hit(kind="SIGTERM twice")


def flip_byte(file: Path, rng: random.Random) -> None:
    """Changes one byte."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randint(1, 255)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    """Cuts off the end."""
    os.truncate(file, rng.randrange(file.stat().st_size))


def delete(file: Path, rng: random.Random) -> None:
    """Deletes the file."""
    file.unlink()


def _damages(kind: str, how: Callable[[Path, random.Random], None]) -> Fault:
    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        start = run.start()
        start.wait_for_step(rng.randint(1, MOST_STEPS))
        # One is left to fall back on.
        start.wait_until(lambda: len(_intact(run)) > 1, "second checkpoint")
        _kill(start)
        run.check_after_fault()
        run.damage(_intact(run)[-1], how, rng)
        return Hit(kind=kind)

    return fault


def _intact(run: DisturbedRun) -> list[int]:
    return [step for step in steps_in(run.checkpoints) if step not in run.damaged]


def fill_disk(run: DisturbedRun, rng: random.Random) -> Hit:
    """Fills the disk until a save has failed, frees it until one has not, and kills the run."""
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
    if start.look() == UNSAVED:  # it was the last step's
        return Hit(kind=DISK_FULL)
    before = set(steps_in(run.checkpoints))
    start.wait_until(lambda: bool(set(steps_in(run.checkpoints)) - before), "a save that succeeds")
    _kill(start)
    return Hit(kind=DISK_FULL)


def _fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))


def make_clock_jump(run: DisturbedRun, rng: random.Random) -> Hit:
    """Starts it with a clock that jumps and files of odd times, and kills it some steps later."""
    for path in run.checkpoints.rglob("*"):
        with contextlib.suppress(OSError):
            os.utime(path, (rng.choice((0, 1, 2**31, 2**33)), rng.uniform(0, 2**32)))
    env = {"PYTHONPATH": str(run.setting.clock), CLOCK_SEED: str(rng.getrandbits(32))}
    start = run.start(env)
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    _kill(start)
    return Hit(kind=CLOCK)


def _kills_process(number: int) -> Fault:
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
    """Stops one of the processes for good with SIGSTOP."""
    start = run.start()
    start.wait_for_step(rng.randint(1, MOST_STEPS))
    start.sleep(rng.uniform(0, 0.1))
    number = rng.randrange(run.setting.num_processes)
    noticed_s = _hit_process(start, number, signal.SIGSTOP, FREEZE_BOUND_S)
    return Hit(kind="freeze 1 process of 2", noticed_s=noticed_s)


def _hit_process(start: Start, number: int, how: signal.Signals, bound_s: float) -> float:
    """Returns the seconds from the signal to the end of all processes and the launcher."""
    pids = start.pids()
    if start.look() == FINISHED or number not in pids:
        raise Missed
    hit_s = time.monotonic()
    os.kill(pids[number], how)
    code = start.end(bound_s)
    left = [pid for pid in pids.values() if is_alive(pid)]
    if left:
        raise Broken(f"the processes {left} outlive their launcher:\n{start.tail()}")
    if code == FINISHED:
        raise Missed
    return time.monotonic() - hit_s


def terminate_launcher(run: DisturbedRun, rng: random.Random) -> Hit:
    """Sends SIGTERM to the launcher."""
    _stop(run, rng, 1)
    return Hit(kind="SIGTERM to the launcher")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, as it is drawn.

    What it hits may be another: a kill that comes too late for the start hits a step.
    """

    fault: Fault
    share: int  # how many of it beside 100 kills at random moments
    num_processes: int = 1


#: The kills at random moments, 100 in all, and the rest.
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


# The campaign.


@dataclass(kw_only=True)
class Tally:
    """What came of the faults of one kind."""

    faults: int = 0
    failures: int = 0
    restarts_s: list[float] = dataclasses.field(default_factory=list)
    noticed_s: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Returns it as plain numbers."""
        return {
            "faults": self.faults,
            "failures": self.failures,
            "restarts": len(self.restarts_s),
            "restart_to_first_new_step_s": _median(self.restarts_s),
            "noticed_s_median": _median(self.noticed_s),
            "noticed_s_max": max(self.noticed_s, default=None),
        }


@dataclass(kw_only=True)
class Results:
    """What came of a campaign, as far as it is."""

    num_runs: int = 0
    num_starts: int = 0
    tallies: dict[str, Tally] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Tally)
    )
    saves_s: list[float] = dataclasses.field(default_factory=list)
    stalls_s: list[float] = dataclasses.field(default_factory=list)
    broken: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def take(self, hit: Hit) -> None:
        """Counts a fault."""
        self.tallies[hit.kind].faults += 1
        if hit.noticed_s is not None:
            self.tallies[hit.kind].noticed_s.append(hit.noticed_s)

    def note(self, run: DisturbedRun, fault_before: str | None) -> None:
        """Takes over the times of a run's last start, which a fault may have made necessary."""
        assert run.last is not None
        self.saves_s += run.last.saves_s
        if run.last.first_step_s is not None and fault_before is not None:
            self.tallies[fault_before].restarts_s.append(run.last.first_step_s)


def draw(kinds: Sequence[str], num_kills: int, rng: random.Random) -> list[str]:
    """Returns the names of the faults to come, in random order: at least one of each kind."""
    names = [name for name in kinds for _ in range(math.ceil(KINDS[name].share * num_kills / 100))]
    rng.shuffle(names)
    return names


def campaign(setting: Setting, names: Sequence[str], rng: random.Random, results: Results) -> None:
    """Disturbs runs until all faults have hit; what came of them is added to `results`."""
    reference = make_reference(setting, results)
    pending, num_missed = collections.deque(names), 0
    while pending and num_missed <= len(names):
        batch = [pending.popleft() for _ in range(min(FAULTS_PER_RUN, len(pending)))]
        results.num_runs += 1
        name = f"{setting.num_processes}_{results.num_runs:03d}"
        with _directory(setting.scratch / name, on_tmpfs=DISK_FULL in batch) as directory:
            run = DisturbedRun(setting, reference, directory)
            missed = disturb(run, batch, rng, results)
        num_missed += len(missed)
        pending.extend(missed)
    if pending:
        raise Broken(f"these faults do not hit, the run ends before them: {sorted(pending)}")


def disturb(
    run: DisturbedRun, names: Sequence[str], rng: random.Random, results: Results
) -> list[str]:
    """Disturbs one run by one fault after another, and lets it end; returns what did not hit."""
    left, kind, is_struck = list(names), None, True
    try:
        with contextlib.suppress(Missed):
            while left:
                before, kind, is_struck = kind, left[0], False
                hit = KINDS[kind].fault(run, rng)
                kind, is_struck = hit.kind, True
                left.pop(0)
                results.take(hit)
                results.note(run, before)
                _say(f"{run.directory.name}: {_describe(hit)}")
                run.check_after_fault()
            run.finish()
        results.note(run, kind)
        run.check_end()
        results.stalls_s += run.stalls_s()
        _say(f"{run.directory.name}: ended as the undisturbed run, after {run.num_starts} starts")
        shutil.rmtree(run.workdir)
    except Broken as error:
        what = kind or "no fault"
        results.tallies[what].failures += 1
        results.broken.append({"workdir": str(run.workdir), "fault": what, "what": str(error)})
        _say(f"{run.directory.name}: BROKEN after {what}: {error}")
        left = left if is_struck else left[1:]  # not this one over and over again
    finally:
        if run.last is not None:
            run.last.kill()
        results.num_starts += run.num_starts
    return left


@contextlib.contextmanager
def _directory(path: Path, on_tmpfs: bool) -> Iterator[Path]:
    """Makes a directory for a run, on a small file system of its own if wanted.

    What is left in that one at the end is copied to the directory.
    """
    path.mkdir()
    if not on_tmpfs:
        yield path
        return
    _mount(path)
    try:
        yield path
    finally:
        kept = path.with_name(f"{path.name}_kept")
        shutil.copytree(path, kept)
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        path.rmdir()
        kept.rename(path)


def _mount(path: Path) -> None:
    options = ["-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(path)]
    subprocess.run(["mount", *options], check=True, capture_output=True, text=True)


def no_small_disk(scratch: Path) -> str | None:
    """Returns why no file system can be mounted, or None if one can."""
    path = scratch / "mounted"
    path.mkdir()
    try:
        _mount(path)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", None) or error).strip()
    subprocess.run(["umount", str(path)], check=True)
    return None


def make_reference(setting: Setting, results: Results) -> Reference:
    """Returns the undisturbed run, made twice: once keeping all checkpoints.

    Raises:
        Broken: the two differ.
    """
    runs = []
    for i in range(2):
        name = f"{setting.num_processes}_reference_{i}"
        empty = Reference(trajectory={}, digests={}, start_s=0.0, save_s=0.0)
        run = DisturbedRun(setting, empty, setting.scratch / name)
        run.directory.mkdir()
        start = run.start(None, *(["checkpoint.max_to_keep=1000"] if i == 0 else []))
        code = start.end()
        if code != FINISHED:
            raise Broken(f"the undisturbed run ended with code {code}:\n{start.tail()}")
        runs.append(run)
    whole, warm = runs
    logged = trajectory(whole.workdir)
    compare(trajectory(warm.workdir), logged)
    start = warm.last
    assert start is not None and start.first_step_s is not None
    loads = setting.scratch / "loads"
    save_s = statistics.median(start.saves_s)
    _say(
        f"{setting.num_processes} process(es), undisturbed: first step after "
        f"{start.first_step_s:.1f} s, a save takes {save_s:.2f} s"
    )
    return Reference(
        trajectory=logged,
        digests={
            step: load(whole.checkpoints / str(step), loads) for step in steps_in(whole.checkpoints)
        },
        start_s=start.first_step_s,
        save_s=save_s,
    )


# Times.


def restart_overhead(setting: Setting) -> dict[str, dict[str, float | None]]:
    """Returns seconds from the start of a process to its first step, by the compilation cache.

    The run begins anew each time: nothing is restored.
    """
    times_s: dict[str, list[float]] = {"cold": [], "warm": []}
    for i in range(NUM_OVERHEAD_ROUNDS):
        shutil.rmtree(setting.cache / "xla", ignore_errors=True)
        for cache, found_s in times_s.items():
            directory = setting.scratch / f"overhead_{cache}_{i}"
            directory.mkdir()
            empty = Reference(trajectory={}, digests={}, start_s=0.0, save_s=0.0)
            start = DisturbedRun(setting, empty, directory).start()
            try:
                start.wait_for_step(2)  # another process has written what it compiled by then
            finally:
                start.kill()
            assert start.first_step_s is not None
            found_s.append(start.first_step_s)
            _say(f"first step after {start.first_step_s:.1f} s, {cache} compilation cache")
            shutil.rmtree(directory)
    return {
        cache: {"median": _median(found_s), "min": min(found_s), "max": max(found_s)}
        for cache, found_s in times_s.items()
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# The command.


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a promise was not kept, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100, help="at random moments; more beside")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, with commas")
    parser.add_argument("--overhead", action="store_true", help="also with a cold cache; minutes")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args(argv)
    kinds = [name for name in args.kinds.split(",") if name]
    unknown = [name for name in kinds if name not in KINDS]
    if args.kills < 1 or unknown:
        print(
            f"error: --kills={args.kills} must be at least 1, and --kinds of {', '.join(KINDS)}",
            file=sys.stderr,
        )
        return 2
    jax.config.update("jax_platforms", "cpu")
    mesh = devices.start(MESH)
    arguments = sys.argv[1:] if argv is None else argv
    scratch = Path(tempfile.mkdtemp(prefix="taibai_faults_"))
    begin_s = time.monotonic()
    setting, results = prepare(scratch), Results()
    skipped = {}
    if DISK_FULL in kinds and (reason := no_small_disk(scratch)):
        kinds.remove(DISK_FULL)
        skipped[DISK_FULL] = reason
        _say(f"{DISK_FULL}: skipped, no small file system can be mounted: {reason}")
    overhead = restart_overhead(setting) if args.overhead else None
    run_all(setting, kinds, args.kills, args.seed, results)
    figures = {
        "command": shlex.join(["python", "-m", "benchmarks.faults", *arguments]),
        "seed": args.seed,
        "versions": report.versions(with_torch=False),
        "hardware": report.hardware(mesh),
        "run": {"config": "configs/gpt2.py", "steps": NUM_STEPS, "overrides": OVERRIDES},
        "wall_s": time.monotonic() - begin_s,
        "skipped": skipped,
        "restart_overhead_s": overhead,
    } | summary(results)
    print(as_text(figures))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    if results.broken:
        print(f"error: promises were not kept; see {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


def run_all(
    setting: Setting, kinds: Sequence[str], num_kills: int, seed: int, results: Results
) -> None:
    """Runs the campaign, first in one process and then in two; `results` gets what came of it."""
    for num_processes in (1, 2):
        chosen = [name for name in kinds if KINDS[name].num_processes == num_processes]
        rng = random.Random(f"{seed} {num_processes}")
        names = draw(chosen, num_kills, rng)
        if names:
            of_these = dataclasses.replace(setting, num_processes=num_processes)
            try:
                campaign(of_these, names, rng, results)
            except Broken as error:
                broken = {"workdir": str(setting.scratch), "fault": "none", "what": str(error)}
                results.broken.append(broken)
                _say(f"BROKEN: {error}")


def summary(results: Results) -> dict[str, Any]:
    """Returns what came of a campaign, as plain numbers and strings."""
    tallies = results.tallies
    order = [*KINDS, *(kind for kind in tallies if kind not in KINDS)]
    return {
        "runs": results.num_runs,
        "starts": results.num_starts,
        "faults": sum(tally.faults for tally in tallies.values()),
        "failures": len(results.broken),
        "save_s": {"median": _median(results.saves_s), "count": len(results.saves_s)},
        "save_stall_s": {"median": _median(results.stalls_s), "count": len(results.stalls_s)},
        "kinds": {kind: tallies[kind].summary() for kind in order if kind in tallies},
        "broken": results.broken,
    }


def as_text(figures: dict[str, Any]) -> str:
    """Returns the figures for a reader."""
    lines = [
        f"{figures['faults']} faults in {figures['runs']} runs of {figures['starts']} starts, "
        f"{figures['wall_s'] / 60:.0f} min; {figures['failures']} promises not kept",
        "",
        f"{'':26}{'faults':>7}{'failures':>10}{'restart s':>11}{'all gone after s':>18}",
    ]
    for kind, tally in figures["kinds"].items():
        noticed = [tally["noticed_s_median"], tally["noticed_s_max"]]
        lines.append(
            f"{kind:26}{tally['faults']:>7}{tally['failures']:>10}"
            f"{_number(tally['restart_to_first_new_step_s']):>11}"
            f"{'–'.join(map(_number, noticed)) if noticed[0] else '-':>18}"
        )
    lines += [f"{kind:26}skipped: {reason}" for kind, reason in figures["skipped"].items()]
    lines += ["", "restart: median from start to first new step; all gone after: median–longest"]
    save_s, stall_s = figures["save_s"]["median"], figures["save_stall_s"]["median"]
    if save_s is not None and stall_s is not None:
        lines.append(f"a save takes {save_s:.2f} s, of which training waits for {stall_s:.2f} s")
    if figures["restart_overhead_s"]:
        cold, warm = (figures["restart_overhead_s"][cache]["median"] for cache in ("cold", "warm"))
        lines.append(
            f"first step after {cold:.1f} s with a cold compilation cache, {warm:.1f} warm"
        )
    lines += [f"{one['workdir']}: after {one['fault']}: {one['what']}" for one in figures["broken"]]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _describe(hit: Hit) -> str:
    return hit.kind + (f", all gone after {hit.noticed_s:.1f} s" if hit.noticed_s else "")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
