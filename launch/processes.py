"""Processes that run beside each other: their output, their ends, and stopping them."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

# What happened: the number of the process that ended, or None for a signal to the launcher; and the
# return code as subprocess gives it, which for a signal is its number negated.
Event = tuple[int | None, int]

_CLEAR_LINE = b"\r\x1b[K"


class Processes:
    """The processes of one run, each the leader of a process group of its own.

    Process 0 keeps the terminal if there is one. All other output is passed on in whole lines, so
    that none is torn apart by another process's; the lines of the others begin with their number.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        events: "queue.SimpleQueue[Event]",
    ):
        """Starts one process per environment.

        Args:
          command: program and arguments, the same for all.
          variables: the whole environment of each process.
          events: where the end of each process is reported; a signal handler may write here too.
        """
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, int] = {}  # return codes of those that have ended
        self._events = events
        self._writing = threading.Lock()
        try:
            for process_id, own in enumerate(variables):
                self._start(process_id, command, own)
        except BaseException:
            self._signal_all(signal.SIGKILL)
            raise

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next thing that happens, None after `timeout_s` seconds of nothing."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event[0] is not None:
            del self.running[event[0]]
            self.codes[event[0]] = event[1]
        return event

    def stop(self, grace_s: float) -> None:
        """Stops all processes: SIGTERM, then SIGKILL after `grace_s` seconds or another signal."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.running:
            event = self.next_event(max(0.0, deadline - time.monotonic()))
            if event is None or event[0] is None:
                break
        self._signal_all(signal.SIGKILL)
        while self.running:
            self.next_event()

    def _start(self, process_id: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        targets = (sys.stdout, sys.stderr)
        inherited = [process_id == 0 and target.isatty() for target in targets]
        stdout, stderr = (None if inherit else subprocess.PIPE for inherit in inherited)
        if stdout is not None:
            # Python would keep lines for a pipe back, and a kill would lose them.
            variables = {"PYTHONUNBUFFERED": "1", **variables}
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # A group of its own lets what it starts be stopped with it.
            start_new_session=True,
        )
        self.running[process_id] = process
        pumps = [
            _start_thread(self._pump, process_id, source, target)
            for source, target in zip((process.stdout, process.stderr), targets, strict=True)
            if source is not None
        ]
        _start_thread(self._wait, process_id, process, pumps)

    def _wait(
        self, process_id: int, process: subprocess.Popen[bytes], pumps: list[threading.Thread]
    ) -> None:
        """Reports the end of a process, once its group is gone and its last lines are out."""
        code = process.wait()
        _signal_group(process, signal.SIGKILL)
        for pump in pumps:
            # Not for ever: a helper that left the group may still hold the pipe open.
            pump.join(timeout=2)
        self._events.put((process_id, code))

    def _pump(self, process_id: int, source: IO[bytes], target: IO[str]) -> None:
        """Passes output on until there is no more."""
        pending = b""
        # If nobody reads the launcher's output any more, closing the source tells the process so.
        with source, contextlib.suppress(OSError):
            while chunk := source.read1(2**16):  # type: ignore
                pending += chunk
                # A line of process 0 may be a progress bar, which ends each state with \r.
                bar = pending.rfind(b"\r") if process_id == 0 else -1
                end = 1 + max(pending.rfind(b"\n"), bar)
                self._write(process_id, pending[:end], target)
                pending = pending[end:]
            self._write(process_id, pending + b"\n" if pending else b"", target)

    def _write(self, process_id: int, text: bytes, target: IO[str]) -> None:
        if not text:
            return
        if process_id != 0:
            # The bar that process 0 may be drawing on a terminal comes back with its next update.
            prefix = (_CLEAR_LINE if target.isatty() else b"") + f"[{process_id}] ".encode()
            # Of a bar of this process, which overwrites itself, the last state is the line.
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in text[:-1].split(b"\n")]
            text = b"".join(prefix + line + b"\n" for line in lines)
        with self._writing:
            target.buffer.write(text)  # type: ignore
            target.flush()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.running.values():
            _signal_group(process, number)


def _start_thread(function: Callable[..., None], *arguments) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Nothing may be left of the group; some systems say so by refusing.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
