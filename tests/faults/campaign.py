"""Runs a campaign of random faults, and collects its results.

A campaign works through a queue of faults. Each run takes a few of them, with a restart after each,
and is then compared with the undisturbed run. A fault that misses, because its run finished first,
goes back into the queue.
"""

import collections
import contextlib
import dataclasses
import random
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.layout import steps_in
from tests.faults.hits import Hit
from tests.faults.kinds import DISK_FULL, KINDS, NEEDS_READ_ERRORS, draw
from tests.faults.results import compare, load, trajectory
from tests.faults.runs import DisturbedRun, Reference, Setting
from tests.faults.start import Broken, Missed, say
from tests.faults.storage import build_read_errors
from train.lifecycle.exit_codes import FINISHED

FAULTS_PER_RUN = 8
TMPFS_BYTES = 64 * 2**20


@dataclass(kw_only=True)
class Tally:
    """Results of the faults of one kind.

    Attributes:
        faults: number of faults that hit.
        failures: number of promises that were broken after them.
        restarts_s: seconds from each restart after them to its first new step.
        noticed_s: seconds from the fault until all processes had exited, where measured.
    """

    faults: int = 0
    failures: int = 0
    restarts_s: list[float] = dataclasses.field(default_factory=list)
    noticed_s: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the results as plain numbers."""
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
    """Results of a campaign so far.

    Attributes:
        num_runs: number of runs.
        num_starts: number of starts of all runs.
        tallies: results by kind of fault.
        saves_s: duration of each save that was observed from beginning to end, in seconds.
        stalls_s: mean time for which a save blocked training, in seconds, one entry per start that
            was killed.
        broken: working directory, fault and message of each broken promise.
    """

    num_runs: int = 0
    num_starts: int = 0
    tallies: dict[str, Tally] = dataclasses.field(default_factory=dict)
    saves_s: list[float] = dataclasses.field(default_factory=list)
    stalls_s: list[float] = dataclasses.field(default_factory=list)
    broken: list[dict[str, str]] = dataclasses.field(default_factory=list)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Results":
        """Return the results whose `dataclasses.asdict` was written as JSON."""
        tallies = {kind: Tally(**tally) for kind, tally in values["tallies"].items()}
        fields: dict[str, Any] = values | {"tallies": tallies}
        return cls(**fields)

    def tally(self, kind: str) -> Tally:
        """Return the results of one kind of fault, to be extended."""
        return self.tallies.setdefault(kind, Tally())

    def take(self, hit: Hit) -> None:
        """Count a fault."""
        self.tally(hit.kind).faults += 1
        if hit.noticed_s is not None:
            self.tally(hit.kind).noticed_s.append(hit.noticed_s)

    def note(self, run: DisturbedRun, fault_before: str | None) -> None:
        """Add the times of a run's last start.

        Args:
            fault_before: kind of the fault that made this start necessary; None for the first one.
        """
        assert run.last is not None
        self.saves_s += run.last.saves_s
        if run.last.first_step_s is not None and fault_before is not None:
            self.tally(fault_before).restarts_s.append(run.last.first_step_s)


def campaign(
    setting: Setting,
    names: Sequence[str],
    rng: random.Random,
    results: Results,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Disturb runs until all faults have hit.

    Args:
        setting: setting of the runs.
        names: names of the faults, with repetitions, in the order of use.
        rng: source of all random choices.
        results: results, which this function extends.
        save: saves the results; called after each run.

    Raises:
        Broken: the undisturbed runs fail or differ, or faults miss too often.
    """
    reference = make_reference(setting)
    pending = collections.deque(names)
    num_missed = 0
    while pending and num_missed <= len(names):
        batch = [pending.popleft() for _ in range(min(FAULTS_PER_RUN, len(pending)))]
        results.num_runs += 1
        name = f"{setting.num_processes}_{results.num_runs:03d}"
        with _directory(setting.scratch / name, on_tmpfs=DISK_FULL in batch) as directory:
            run = DisturbedRun(setting, reference, directory)
            missed = disturb(run, batch, rng, results)
        num_missed += len(missed)
        pending.extend(missed)
        save()
    if pending:
        raise Broken(f"these faults keep missing, because the runs end first: {sorted(pending)}")


def disturb(
    run: DisturbedRun, names: Sequence[str], rng: random.Random, results: Results
) -> list[str]:
    """Disturb one run with several faults, let it finish, and check it.

    Args:
        run: run that has not been started.
        names: names of the faults, in order.
        rng: source of all random choices.
        results: results, which this function extends.

    Returns:
        The names of the faults that have yet to hit. If a fault broke a promise before it hit, it
        is not among them, so that it is not tried again and again.
    """
    left = list(names)
    kind = None
    is_struck = True
    try:
        with contextlib.suppress(Missed):
            while left:
                before = kind
                kind = left[0]
                is_struck = False
                hit = KINDS[kind].fault(run, rng)
                kind = hit.kind
                is_struck = True
                left.pop(0)
                results.take(hit)
                results.note(run, before)
                say(f"{run.directory.name}: {_describe(hit)}")
                run.check_after_fault()
            run.finish()
        results.note(run, kind)
        run.check_end()
        results.stalls_s += run.stalls_s()
        say(f"{run.directory.name}: equals the undisturbed run, after {run.num_starts} starts")
        shutil.rmtree(run.workdir)
    except Broken as error:
        what = kind or "no fault"
        results.tally(what).failures += 1
        results.broken.append({"workdir": str(run.workdir), "fault": what, "what": str(error)})
        say(f"{run.directory.name}: BROKEN after {what}: {error}")
        left = left if is_struck else left[1:]  # drop a fault that breaks a promise before it hits
    finally:
        if run.last is not None:
            run.last.kill()
        results.num_starts += run.num_starts
    return left


@contextlib.contextmanager
def _directory(path: Path, on_tmpfs: bool) -> Iterator[Path]:
    """Create a directory for a run, optionally as a mounted tmpfs of TMPFS_BYTES.

    At the end, the files on the tmpfs are copied to a regular directory at the same path.
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


def impossible_kinds(setting: Setting, kinds: Sequence[str]) -> dict[str, str]:
    """Return which of the kinds of faults this machine cannot produce -> why."""
    reasons = {}
    if DISK_FULL in kinds and (reason := _no_small_disk(setting.scratch)):
        reasons[DISK_FULL] = f"no small file system can be mounted: {reason}"
    of_reads = [kind for kind in kinds if kind in NEEDS_READ_ERRORS]
    if of_reads and (reason := build_read_errors(setting)):
        reasons |= dict.fromkeys(of_reads, f"there is no C compiler: {reason}")
    return reasons


def _no_small_disk(scratch: Path) -> str | None:
    """Return why no tmpfs can be mounted, or None if one can."""
    path = scratch / "mounted"
    path.mkdir()
    try:
        _mount(path)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", None) or error).strip()
    subprocess.run(["umount", str(path)], check=True)
    return None


def make_reference(setting: Setting) -> Reference:
    """Train the undisturbed run twice, and check that both agree.

    The first run keeps all checkpoints, for the digests. The second has a warm compilation cache,
    for the times.

    Args:
        setting: setting of the runs.

    Returns:
        The reference for all disturbed runs.

    Raises:
        Broken: an undisturbed run fails, or the two differ.
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
            raise Broken(f"the undisturbed run exited with code {code}:\n{start.tail()}")
        runs.append(run)
    whole, warm = runs
    logged = trajectory(whole.workdir)
    compare(trajectory(warm.workdir), logged)
    start = warm.last
    assert start is not None and start.first_step_s is not None
    loads = setting.scratch / "loads"
    save_s = statistics.median(start.saves_s)
    say(
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


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def run_all(
    setting: Setting,
    kinds: Sequence[str],
    num_kills: int,
    seed: int,
    results: Results,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Run the campaign, first with one process per run and then with two.

    Args:
        setting: setting of the runs, with one process.
        kinds: names of the kinds of faults.
        num_kills: number of kills at random moments.
        seed: seed of all random choices.
        results: results, which this function extends.
        save: saves the results; called after each run.
    """
    for num_processes in (1, 2):
        chosen = [name for name in kinds if KINDS[name].num_processes == num_processes]
        rng = random.Random(f"{seed} {num_processes}")
        names = draw(chosen, num_kills, rng)
        if names:
            of_these = dataclasses.replace(setting, num_processes=num_processes)
            try:
                campaign(of_these, names, rng, results, save)
            except Broken as error:
                broken = {"workdir": str(setting.scratch), "fault": "none", "what": str(error)}
                results.broken.append(broken)
                say(f"BROKEN: {error}")


def summary(results: Results) -> dict[str, Any]:
    """Return the results of a campaign as plain numbers and strings."""
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


def _describe(hit: Hit) -> str:
    return hit.kind + (f", all gone after {hit.noticed_s:.1f} s" if hit.noticed_s else "")
