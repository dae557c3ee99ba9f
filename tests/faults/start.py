"""One start of a run, as it is seen and disturbed from outside."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from checkpoint.layout import TMP_SUFFIX
from train import goodput
from train.lifecycle.exit_codes import FINISHED

ROOT = Path(__file__).parents[2]
#: Nothing here takes so long: what does hangs.
PATIENCE_S = 300.0


class Broken(Exception):
    """A promise that a run did not keep; the message says which."""


class Missed(Exception):
    """The run came to its end before the fault."""


class Attempt:
    """A process, or a launcher with its processes, and what can be seen of it from outside."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], workdir: Path, log: Path):
        """Start it.

        Args:
            command: program and arguments.
            env: the whole environment.
            workdir: the run's directory.
            log: where standard output and standard error go.
        """
        self._workdir = workdir
        self._log = log
        self._record = workdir / goodput.GOODPUT_DIRECTORY / f"{_num_starts(workdir) + 1:04d}.json"
        self._being_saved: dict[str, float] = {}
        self._stale = _half_written(workdir)
        #: Seconds from here to the first new step; None before it.
        self.first_step_s: float | None = None
        #: What each save took in all, of those seen from beginning to end.
        self.saves_s: list[float] = []
        self.began_s = time.monotonic()
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def step(self) -> int:
        """Return the last new step that it logged, 0 before the first."""
        try:
            return json.loads(self._record.read_text())["last_step"]
        except OSError:
            return 0

    def is_saving(self) -> bool:
        """Return whether a directory is there that is being written or deleted."""
        return bool(_half_written(self._workdir) - self._stale)

    def look(self) -> int | None:
        """Update the state; return the exit code, or None while the run continues."""
        code = self.process.poll()
        now_s = time.monotonic()
        if self.first_step_s is None and self._record.exists():
            self.first_step_s = now_s - self.began_s
        written = {name for name, *_ in _half_written(self._workdir) - self._stale}
        for name in {name for name in written if "-deleted-" not in name}:
            self._being_saved.setdefault(name, now_s)
        for name in self._being_saved.keys() - written:
            self.saves_s.append(now_s - self._being_saved.pop(name))
        return code

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Return as soon as `condition` holds.

        Raises:
            Missed: it finished before.
            Broken: it ended in another way, or nothing happened for PATIENCE_S.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            code = self.look()
            if condition():
                return
            if code == FINISHED:
                raise Missed
            if code is not None:
                raise Broken(f"it ended with code {code} by itself, before {what}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise Broken(f"no {what} in {PATIENCE_S:.0f} s:\n{self.tail()}")
            time.sleep(0.002)

    def wait_for_step(self, num_new: int) -> None:
        """Return when it has logged so many new steps."""
        self.wait_until(lambda: self.step() > 0, "a first step")
        last = self.step() + num_new - 1
        self.wait_until(lambda: self.step() >= last, f"step {last}")

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds, or when it has ended."""
        deadline_s = time.monotonic() + seconds
        while self.look() is None and time.monotonic() < deadline_s:
            time.sleep(min(0.002, seconds))

    def end(self, bound_s: float = PATIENCE_S) -> int:
        """Return the exit code once it has ended.

        Raises:
            Broken: it lives for longer than `bound_s`, or a process of it outlives its end.
        """
        pids = self.pids().values()
        deadline_s = time.monotonic() + bound_s
        while (code := self.look()) is None:
            if time.monotonic() > deadline_s:
                raise Broken(f"it lives after {bound_s:.0f} s:\n{self.tail()}")
            time.sleep(0.002)
        left = [pid for pid in pids if is_alive(pid)]
        if left:
            raise Broken(f"the processes {left} outlive their launcher:\n{self.tail()}")
        return code

    def kill(self) -> None:
        """Kill all remaining processes."""
        pids = self.pids()
        for pid in (self.process.pid, *pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait()
        self.look()

    def pids(self) -> dict[int, int]:
        """Return the process ids of the launcher's processes by their numbers in the run."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    entries = (directory / "environ").read_bytes().split(b"\0")
                    variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
                    found[int(variables.get(b"TAIBAI_PROCESS_ID", b""))] = int(directory.name)
        return found

    def tail(self) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.splitlines()[-12:])


def _num_starts(workdir: Path) -> int:
    names = (path.stem for path in (workdir / goodput.GOODPUT_DIRECTORY).glob("[0-9]*.json"))
    return max(map(int, names), default=0)


def _half_written(workdir: Path) -> set[tuple[str, int, int]]:
    """Return name, inode and time of change of what is being written, or was when it was killed.

    Another process may use a name and an inode again, but it cannot set the time of change.
    """
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(workdir / "checkpoints"):
            if TMP_SUFFIX in entry.name:
                with contextlib.suppress(OSError):
                    stat = entry.stat()
                    found.add((entry.name, stat.st_ino, stat.st_ctime_ns))
    return found


def is_alive(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False
