"""Ends a process that hangs, and reports where it hangs and which processes are responsible.

A collective that waits for a lost process never returns, and Python cannot interrupt it. So each
process runs two threads. One writes heartbeats: a small file in a shared directory. The other
watches how long its own process has been in the current phase. If that takes too long, it reads the
heartbeats of all processes twice, reports which of them are gone or behind, and exits.

Clocks of different processes are never compared, only heartbeat counters and steps.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.lifecycle.exit_codes import HUNG
from train.lifecycle.phases import NAMES, Phases, PhaseStatus
from untrusted.documents import read_json
from untrusted.files import write_text

#: Phases that may take arbitrarily long.
UNWATCHED = ("startup", "compile", "restore")

_LONGEST_INTERVAL_S = 15.0
_BUSY_MACHINE_S = 30.0  # that a report may be late because the machine is busy
_READ_LIMIT_S = 60.0  # to read thousands of files, on a file system that may hang as well
_MOST_LISTED = 20
_STDERR = 2  # the file descriptor, since sys.stderr may be replaced


@dataclass(frozen=True, kw_only=True)
class _Heartbeat:
    """A heartbeat: the contents of a process's file."""

    run_id: str
    host: str
    pid: int
    beat: int  # increases with each write
    step: int
    phase: str
    seconds: float  # in this phase
    ended: bool  # the process noticed that it hangs, and exited

    @property
    def rank(self) -> tuple[int, int]:
        """Progress of the process, for comparison with others."""
        return self.step, NAMES.index(self.phase)

    def __str__(self) -> str:
        return f"at step {self.step}, in phase {self.phase}"


def jax_heartbeat_timeout_s(timeout_s: float) -> int:
    """Return a timeout for jax's own heartbeats that lets the watchdog report first.

    jax ends a process without a report if another one sends no heartbeat for its timeout. Each
    process sends one every half of it, so this may happen half a timeout after the other froze.
    """
    report_s = timeout_s + _interval_s(timeout_s) + _observation_s(timeout_s)
    return math.ceil(2 * (report_s + _BUSY_MACHINE_S))


def end_process() -> None:
    """Exit this process with HUNG, without any cleanup, since that could hang too."""
    os._exit(HUNG)


class Watchdog:
    """Watches one process, and publishes its heartbeat to the others, until `close`.

    If the process stays in one phase for longer than `timeout_s`, except for the phases UNWATCHED,
    the watchdog reads all heartbeats twice, writes a report to standard error, and calls `on_hang`,
    unless the process continued in the meantime.

    With an interval of `timeout_s / 4`, but at most 15 s, this takes up to the phase's timeout plus
    2.5 intervals plus a few seconds from the beginning of the phase. A hanging file system delays
    it by at most another minute.
    """

    def __init__(
        self,
        directory: str | Path,
        phases: Phases,
        *,
        process: int,
        num_processes: int,
        run_id: str,
        timeout_s: float,
        save_timeout_s: float | None = None,
        on_hang: Callable[[], object] = end_process,
    ):
        """Start watching.

        If the directory cannot be written, this is reported once on standard error; it is not an
        error.

        Args:
            directory: directory that all processes share; it is created if necessary.
            run_id: identifier that is the same on all processes and different at each start.
                Files with another identifier are leftovers and are ignored.
            timeout_s: longest duration of a phase, in seconds.
            save_timeout_s: the same for the phase "save", if it is different.
            on_hang: called at most once, on the watching thread, after the report.

        Raises:
            ValueError: `timeout_s` is not positive.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive; choose a number of seconds")
        self._directory = Path(directory)
        self._phases = phases
        self._process = process
        self._num_processes = num_processes
        self._run_id = run_id
        self._limits = {name: ("train.failure_timeout_s", timeout_s) for name in NAMES}
        self._limits |= {name: ("", math.inf) for name in UNWATCHED}
        if save_timeout_s is not None:
            self._limits["save"] = ("checkpoint.timeout_s", save_timeout_s)
        self._on_hang = on_hang
        self._interval_s = _interval_s(timeout_s)
        self._observation_s = _observation_s(timeout_s)
        self._host = socket.gethostname()
        self._write_lock = threading.Lock()
        self._beat = 0
        self._has_ended = self._has_reported_write_error = False
        self._closed = threading.Event()
        # Two threads, because a hanging file system may block the one that writes.
        self._threads = [
            threading.Thread(target=self._write_heartbeats, name="watchdog beat", daemon=True),
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching, and remove this process's file."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._path(self._process).unlink(missing_ok=True)

    def _write_heartbeats(self) -> None:
        with contextlib.suppress(OSError):  # if this fails, writing fails too, and reports it
            self._directory.mkdir(parents=True, exist_ok=True)
        while not self._closed.is_set():
            self._write_heartbeat()
            self._closed.wait(self._interval_s)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            status = self._phases.current
            if status.seconds <= self._limits[status.name][1]:
                continue
            # In a thread of its own, because reading and writing files may hang as well.
            reporter = threading.Thread(target=self._report, args=(status,), daemon=True)
            reporter.start()
            reporter.join(self._observation_s + _READ_LIMIT_S)
            if self._is_unchanged_since(status):
                self._on_hang()
                return
            if not self._closed.is_set():
                _print_lines([f"process {self._process} has continued"])

    def _report(self, status: PhaseStatus) -> None:
        own_heartbeat = self._heartbeat(status)
        (key, limit_s) = self._limits[status.name]
        timeout_message = (
            f"{_name(self._process, own_heartbeat)} has been {own_heartbeat} for "
            f"{status.seconds:.0f} s, longer than {key}={limit_s:g}"
        )
        num_others = self._num_processes - 1
        search_message = f"; looking for {num_others} other process(es) in {self._directory}"
        _print_lines([timeout_message + search_message if num_others else timeout_message])
        first = self._read_others()
        self._closed.wait(self._observation_s)
        second = self._read_others()
        if not self._is_unchanged_since(status):
            return
        lines, is_own_fault = self._diagnose(own_heartbeat, first, second)
        _print_lines([*lines, *(["the stacks of this process:"] if is_own_fault else [])])
        if is_own_fault:
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        # Tell processes that look later that this one exited by itself and was not killed.
        self._has_ended = True
        self._write_heartbeat()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def _diagnose(
        self,
        own_heartbeat: _Heartbeat,
        first: Mapping[int, _Heartbeat],
        second: Mapping[int, _Heartbeat],
    ) -> tuple[list[str], bool]:
        """Compare two readings of the heartbeats.

        Args:
            first: process index -> heartbeat, for the others.
            second: the same, some seconds later.

        Returns:
            Lines of the report, and whether this process is itself the cause of the hang.
        """
        others = [index for index in range(self._num_processes) if index != self._process]
        silent = [i for i in others if i not in second]
        gone = {
            i
            for i, heartbeat in second.items()
            if i in first and heartbeat.beat == first[i].beat and not heartbeat.ended
        }
        alive = {i: heartbeat for i, heartbeat in second.items() if i not in gone}
        behind = [i for i, heartbeat in alive.items() if heartbeat.rank < own_heartbeat.rank]
        ahead = [i for i, heartbeat in alive.items() if heartbeat.rank > own_heartbeat.rank]
        lines = [f"{_name(i, second[i])} is gone: its last heartbeat was {second[i]}" for i in gone]
        lines += [
            f"{_name(i, alive[i])} is behind: {alive[i]} for {alive[i].seconds:.0f} s"
            for i in sorted(behind, key=lambda i: alive[i].rank)
        ]
        lines += [f"process {i} has no heartbeat: it has ended, or never started" for i in silent]
        lines = _at_most_listed(lines)
        if ahead and not behind:
            lines.append(
                f"no process is behind this one, and {len(ahead)} ahead wait for it, such as "
                f"{_name(ahead[0], alive[ahead[0]])}, {alive[ahead[0]]}"
            )
        elif not lines:
            what = "the step" if own_heartbeat.phase == "step" else f"phase {own_heartbeat.phase}"
            everyone = f"all {self._num_processes} processes are alive and"
            lines.append(
                f"{everyone if others else 'this process is'} {own_heartbeat}: {what} itself hangs"
            )
        return lines, not behind and (bool(ahead) or not gone and not silent)

    def _is_unchanged_since(self, status: PhaseStatus) -> bool:
        return not self._closed.is_set() and self._phases.current.changes == status.changes

    def _path(self, process: int) -> Path:
        return self._directory / f"{process}.json"

    def _heartbeat(self, status: PhaseStatus) -> _Heartbeat:
        return _Heartbeat(
            run_id=self._run_id,
            host=self._host,
            pid=os.getpid(),
            beat=self._beat,
            step=status.step,
            phase=status.name,
            seconds=status.seconds,
            ended=self._has_ended,
        )

    def _write_heartbeat(self) -> None:
        path = self._path(self._process)
        with self._write_lock:
            self._beat += 1
            heartbeat = self._heartbeat(self._phases.current)
            try:
                write_text(path, json.dumps(dataclasses.asdict(heartbeat)))
            except OSError as error:
                if not self._has_reported_write_error:
                    name = f"process {self._process}"
                    _print_lines(
                        [f"{name} cannot write its heartbeat, but keeps watching: {error}"]
                    )
                self._has_reported_write_error = True

    def _read_others(self) -> dict[int, _Heartbeat]:
        """Return the heartbeats of this start's other processes that can be read."""
        heartbeats = {}
        for index in range(self._num_processes):
            if index != self._process:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    heartbeat = _Heartbeat(**read_json(self._path(index)))
                    if heartbeat.run_id == self._run_id and heartbeat.phase in NAMES:
                        heartbeats[index] = heartbeat
        return heartbeats


def _interval_s(timeout_s: float) -> float:
    """Return the seconds from one heartbeat, and one look at the own phase, to the next."""
    return min(timeout_s / 4, _LONGEST_INTERVAL_S)


def _observation_s(timeout_s: float) -> float:
    """Return the seconds within which a live process writes a heartbeat, even if it is late."""
    return 1.5 * _interval_s(timeout_s) + 1


def _name(process: int, heartbeat: _Heartbeat) -> str:
    return f"process {process} on {heartbeat.host} (pid {heartbeat.pid})"


def _at_most_listed(lines: Sequence[str]) -> list[str]:
    num_unlisted = len(lines) - _MOST_LISTED
    return [*lines[:_MOST_LISTED], f"and {num_unlisted} more"] if num_unlisted > 0 else list(lines)


def _print_lines(lines: Sequence[str]) -> None:
    """Write lines to standard error in a single write."""
    text = "".join(f"watchdog: {line}\n" for line in lines)
    with (
        contextlib.suppress(OSError),
        open(_STDERR, "w", encoding="utf-8", errors="replace", closefd=False) as stderr,
    ):
        stderr.write(text)
