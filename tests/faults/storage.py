"""Faults in the storage of a run: checkpoints that cannot be read, and files with hard links."""

import random
import subprocess
from pathlib import Path

from checkpoint.checksums import find_damage
from checkpoint.layout import steps_in
from tests.faults.hits import MOST_STEPS, Fault, Hit, kill
from tests.faults.runs import CHECKPOINT_DIRECTORY, DisturbedRun, Setting
from tests.faults.start import Attempt, Broken, Missed
from train.lifecycle.exit_codes import FAILED, REFUSED

_SOURCE = Path(__file__).with_name("read_errors.c")
#: A run reads again for 3.5 s. Errors that last less must not stop it.
_SHORT_S = 3.0
_FOREVER_S = 1e9


def build_read_errors(setting: Setting) -> str | None:
    """Compile the library that makes reads fail; return why this is not possible, or None."""
    library = setting.read_errors
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", None) or error).strip()
    return None


def read_errors(kind: str, *, lasts: bool, hits_one: bool = False) -> Fault:
    """Return a fault that makes reads of one or of all checkpoints fail during a start.

    Args:
        kind: name of the fault.
        lasts: whether they fail during the whole start, or for a few seconds.
        hits_one: whether they fail only in one process of several.
    """

    def fault(run: DisturbedRun, rng: random.Random) -> Hit:
        if not _has_intact_newest(run):  # the run would resume from another one
            start = run.start()
            start.wait_until(lambda: _has_intact_newest(run), "an intact newest checkpoint")
            kill(start)
            run.check_after_fault()
        steps = steps_in(run.checkpoints)
        variables = {"TAIBAI_FAULTS_STEP": str(steps[-1])} if rng.random() < 0.5 else {}
        if hits_one:
            variables["TAIBAI_FAULTS_PROCESS"] = str(rng.randrange(run.setting.num_processes))
        seconds = _FOREVER_S if lasts else rng.uniform(0.1, _SHORT_S)
        start = run.start(unreadable(run, seconds) | variables)
        if lasts:
            noticed_s = _check_refusal(start)
        else:
            start.wait_for_step(rng.randint(1, MOST_STEPS))
            kill(start)
            noticed_s = None
        if not has_failed_read(run):
            raise Broken("no read has failed: the run reads checkpoints in a way that is not hit")
        _marker(run).unlink()
        _check_resumed(run, start, steps, has_trained=not lasts)
        return Hit(kind=kind, noticed_s=noticed_s)

    return fault


#: Name -> fault, in runs with one process.
READ_ERRORS = {
    "read errors pass": read_errors("read errors pass", lasts=False),
    "read errors last": read_errors("read errors last", lasts=True),
}
#: The same in one of two processes.
READ_ERRORS_IN_1 = {
    "read errors in 1 of 2 pass": read_errors(
        "read errors in 1 of 2 pass", lasts=False, hits_one=True
    ),
    "read errors in 1 of 2 last": read_errors(
        "read errors in 1 of 2 last", lasts=True, hits_one=True
    ),
}


def unreadable(run: DisturbedRun, seconds: float) -> dict[str, str]:
    """Return the environment of a start whose reads fail for some seconds after the first one."""
    return {
        "LD_PRELOAD": str(run.setting.read_errors),
        "TAIBAI_FAULTS_UNREADABLE": str(run.checkpoints.resolve()),
        "TAIBAI_FAULTS_SECONDS": str(seconds),
        "TAIBAI_FAULTS_MARKER": str(_marker(run)),
    }


def has_failed_read(run: DisturbedRun) -> bool:
    """Return whether a read of a start with `unreadable` has failed."""
    return _marker(run).exists()


def _has_intact_newest(run: DisturbedRun) -> bool:
    steps = steps_in(run.checkpoints)
    return bool(steps) and find_damage(run.checkpoints / str(steps[-1])) is None


def _marker(run: DisturbedRun) -> Path:
    return run.directory / "read_failed"


def _check_refusal(start: Attempt) -> float:
    """Check that a start ends with an error after which a launcher starts it again."""
    code = start.end()
    if code != FAILED or "cannot be read" not in start.log or "Traceback" in start.log:
        raise Broken(f"without readable checkpoints, it exited with {code}:\n{start.tail()}")
    return start.age_s()


def _check_resumed(run: DisturbedRun, start: Attempt, steps: list[int], has_trained: bool) -> None:
    """Check that a start neither skipped nor lost a checkpoint that it could not read."""
    if "Skipping checkpoint" in start.log:
        raise Broken(f"it skipped a checkpoint that it could not read:\n{start.tail()}")
    if has_trained:
        line = f"step {steps[-1]} of "
        if line not in start.log:
            raise Broken(f"it did not resume from step {steps[-1]}:\n{start.tail()}")
    elif steps_in(run.checkpoints) != steps:
        raise Broken(f"of steps {steps}, only {steps_in(run.checkpoints)} are left")


def link_file(run: DisturbedRun, rng: random.Random) -> Hit:
    """Give a file that a run writes, or will write, another name outside of its workdir.

    The run must leave the content of the other name alone: it refuses to start, or replaces the
    file. After the link is removed, it must work.
    """
    if not run.workdir.exists():
        start = run.start()
        start.wait_for_step(1)
        kill(start)
    path = rng.choice(_written_files(run))
    target = run.directory / "linked"
    is_new = not path.exists()
    if is_new:
        target.write_bytes(b"precious")
        path.parent.mkdir(exist_ok=True)
        path.hardlink_to(target)
    else:
        target.hardlink_to(path)
    content = target.read_bytes()
    start = run.start()
    try:
        start.wait_until(lambda: start.step() > 0 or start.look() is not None, "a first step")
    except Missed:
        pass  # check the link first
    _check_linked(start, path, target, content)
    if is_new and path.exists() and path.samefile(target):
        path.unlink()
    target.unlink()
    return Hit(kind="hard link")


def _check_linked(start: Attempt, path: Path, target: Path, content: bytes) -> None:
    code = start.look()
    if code is None:
        kill(start)
    elif code == REFUSED:
        errors = [line for line in start.log.splitlines() if line.startswith("error: ")]
        if len(errors) != 1 or str(path) not in errors[0] or "Traceback" in start.log:
            raise Broken(f"{path} is not refused in one sentence:\n{start.tail()}")
    elif code != 0:
        raise Broken(f"with a hard link at {path}, it exited with {code}:\n{start.tail()}")
    if target.read_bytes() != content:
        raise Broken(f"the run has written through the hard link at {path}")


def _written_files(run: DisturbedRun) -> list[Path]:
    """Return the files that a start writes, except those of checkpoints; some do not exist yet."""
    names = {
        "lock",
        "memory.txt",
        "run.json",
        "config.yaml",
        "watchdog/0.json",
        "metrics.jsonl",
    }
    found = {
        path
        for path in run.workdir.rglob("*")
        if path.is_file() and not path.is_relative_to(run.workdir / CHECKPOINT_DIRECTORY)
    }
    next_record = run.workdir / "goodput" / f"{run.num_starts + 1:04d}.json"
    return sorted({*found, *(run.workdir / name for name in names), next_record})
