"""One start of a run, which is observed and disturbed from outside its processes.

Progress is read from the files that the run writes: its goodput record names the last step, and
temporary directories among the checkpoints show that a save is in progress.
"""

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
#: Longest time to wait for anything. Whatever takes longer counts as hung.
LONGEST_WAIT_S = 300.0


class Broken(Exception):
    """A run broke a promise; the message says which one."""


class Missed(Exception):
    """The run finished before the fault could hit it."""


class Attempt:
    """A process, or a launcher and its processes.

    Attributes:
        process: process, or the launcher.
        has_log: whether its output is written to the log file.
        first_step_s: seconds from the start to the first new step; None before this step.
        saves_s: seconds of each save that was observed from beginning to end.
        began_s: monotonic time of the start, in seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: Path,
        log: Path,
        *,
        output: int | None = None,
    ):
        """Start the process.

        Args:
            command: program and arguments.
            env: complete environment.
            workdir: run's working directory.
            log: file for standard output and standard error.
            output: file descriptor to use instead; then the log stays empty.
        """
        self.has_log = output is None
        self._workdir = workdir
        self._log = log
        self._record = workdir / goodput.GOODPUT_DIRECTORY / f"{_num_starts(workdir) + 1:04d}.json"
        self._being_saved: dict[str, float] = {}
        self._stale = _half_written(workdir)
        self.first_step_s: float | None = None
        self.saves_s: list[float] = []
        self.began_s = time.monotonic()
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file if output is None else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def step(self) -> int:
        """Return the last step that this start logged, or 0 before the first one."""
        try:
            return json.loads(self._record.read_text())["last_step"]
        except OSError:
            return 0

    def is_saving(self) -> bool:
        """Return whether a checkpoint directory is being written or deleted."""
        return bool(_half_written(self._workdir) - self._stale)

    def look(self) -> int | None:
        """Update `first_step_s` and `saves_s`; return the exit code, or None while running."""
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
        """Wait until `condition` holds.

        Args:
            condition: function that is called repeatedly.
            what: awaited event, for messages, such as "a save".

        Raises:
            Missed: the run finished first.
            Broken: it exited with an error, or the condition did not hold within LONGEST_WAIT_S.
        """
        deadline_s = time.monotonic() + LONGEST_WAIT_S
        while True:
            code = self.look()
            if condition():
                return
            if code == FINISHED:
                raise Missed
            if code is not None:
                raise Broken(f"it exited with code {code}, before {what}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise Broken(
                    f"still no sign of {what} after {LONGEST_WAIT_S:.0f} s:\n{self.tail()}"
                )
            time.sleep(0.002)

    def wait_for_step(self, num_new: int) -> None:
        """Wait until `num_new` steps have been logged since the start."""
        self.wait_until(lambda: self.step() > 0, "a first step")
        last = self.step() + num_new - 1
        self.wait_until(lambda: self.step() >= last, f"step {last}")

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds, or until the process exits."""
        deadline_s = time.monotonic() + seconds
        while self.look() is None and time.monotonic() < deadline_s:
            time.sleep(min(0.002, seconds))

    def sleep_in_start(self, seconds: float) -> None:
        """Sleep for some seconds, or until the first step; a small run would end soon after it."""
        deadline_s = time.monotonic() + seconds
        while self.look() is None and self.first_step_s is None and time.monotonic() < deadline_s:
            time.sleep(0.002)

    def end(self, bound_s: float = LONGEST_WAIT_S) -> int:
        """Wait until the process exits, and return its exit code.

        Args:
            bound_s: longest time to wait, in seconds.

        Returns:
            The exit code.

        Raises:
            Broken: it is still running after `bound_s`, or one of its processes outlived it.
        """
        pids = self.pids().values()
        deadline_s = time.monotonic() + bound_s
        while (code := self.look()) is None:
            if time.monotonic() > deadline_s:
                raise Broken(f"it is still running after {bound_s:.0f} s:\n{self.tail()}")
            time.sleep(0.002)
        left = [pid for pid in pids if is_alive(pid)]
        if left:
            raise Broken(f"processes {left} outlived their launcher:\n{self.tail()}")
        return code

    def age_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began_s

    def kill(self) -> None:
        """Kill the process, and all processes of a launcher."""
        pids = self.pids()
        for pid in (self.process.pid, *pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait()
        self.look()

    def pids(self) -> dict[int, int]:
        """Return the launcher's processes: number in the run -> process id."""
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
        """Return the last lines of the output."""
        return "\n".join(self.log.splitlines()[-12:])


def _num_starts(workdir: Path) -> int:
    names = (path.stem for path in (workdir / goodput.GOODPUT_DIRECTORY).glob("[0-9]*.json"))
    return max(map(int, names), default=0)


def _half_written(workdir: Path) -> set[tuple[str, int, int]]:
    """Return the (name, inode, change time) of each temporary checkpoint directory.

    A save is writing it, or was writing it when it was killed. All three values are needed to tell
    these apart: a later save may reuse a name and an inode, but no process can set the change time.
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
    """Return whether a process exists and has not exited; zombies count as exited."""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def say(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)
