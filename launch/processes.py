"""Child processes that run side by side: starts them, forwards their output, and stops them.

For each child, one thread waits for it to exit and one thread per pipe forwards its output. All
exits and signals arrive in one queue of events, so the launcher's main thread has a single thing
to wait for:

    stdout, stderr of child i --> _pump threads --> the launcher's stdout, stderr
    exit of child i           --> _wait thread  --+
    signal to the launcher    --> its handler   --+--> events --> Processes.next_event()
"""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

# The number of the process that ended, or None for a signal to the launcher; and the return code
# as subprocess reports it, which for a signal is the negative signal number.
Event = tuple[int | None, int]

# Returns to the start of the terminal's line and clears it.
_CLEAR_LINE = b"\r\x1b[K"


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Let the kernel kill this new process when the launcher dies, even by SIGKILL."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Processes:
    """The processes of one run, each the leader of its own process group.

    Process 0 inherits the terminal if there is one. All other output is forwarded in whole lines,
    so that lines of different processes do not mix. Lines from processes other than 0 are prefixed
    with the process number.

    Attributes:
        running: processes that have not ended, by number.
        codes: return codes of the processes that have ended, by number.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        events: "queue.SimpleQueue[Event]",
    ):
        """Start one process per environment.

        Args:
            command: program and arguments, the same for all processes.
            variables: complete environment of each process.
            events: queue that receives the exit of each process. Signal handlers may write to it
                too.
        """
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, int] = {}
        self._events = events
        self._writing = threading.Lock()
        try:
            for process_id, own in enumerate(variables):
                self._start(process_id, command, own)
        except BaseException:
            self._signal_all(signal.SIGKILL)
            raise

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, or None if there is none within `timeout_s` seconds.

        Args:
            timeout_s: seconds to wait; None waits indefinitely.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event[0] is not None:
            del self.running[event[0]]
            self.codes[event[0]] = event[1]
        return event

    def stop(self, grace_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Stop all processes: send SIGTERM, and SIGKILL to those that remain.

        Args:
            grace_s: seconds between the two signals.
            is_urgent: whether to end the wait early; called after every event.
        """
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.running and not is_urgent():
            if self.next_event(max(0.0, deadline - time.monotonic())) is None:
                break
        self._signal_all(signal.SIGKILL)
        while self.running:
            self.next_event()

    def _start(self, process_id: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        targets = (sys.stdout, sys.stderr)
        inherited = [process_id == 0 and target.isatty() for target in targets]
        stdout, stderr = (None if inherit else subprocess.PIPE for inherit in inherited)
        if stdout is not None:
            # Python buffers output to a pipe, and SIGKILL would discard the buffer.
            variables = {"PYTHONUNBUFFERED": "1", **variables}
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # In its own process group, so that stopping it also stops the helpers that it starts.
            start_new_session=True,
            preexec_fn=_die_with_parent,
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
        """Report the exit of a process after killing its group and forwarding its last lines."""
        code = process.wait()
        _signal_group(process, signal.SIGKILL)
        for pump in pumps:
            # With a timeout, because a helper that left the group may keep the pipe open.
            pump.join(timeout=2)
        self._events.put((process_id, code))

    def _pump(self, process_id: int, source: IO[bytes], target: IO[str]) -> None:
        """Forward output until the pipe is closed."""
        pending = b""
        # If the launcher's own output has been closed, `with source` closes the pipe as well, so
        # that the process gets an error when it writes.
        with source, contextlib.suppress(OSError):
            while chunk := source.read1(2**16):  # type: ignore
                pending += chunk
                # Process 0 may draw a progress bar, each state of which ends with \r.
                bar = pending.rfind(b"\r") if process_id == 0 else -1
                end = 1 + max(pending.rfind(b"\n"), bar)
                self._write(process_id, pending[:end], target)
                pending = pending[end:]
            self._write(process_id, pending + b"\n" if pending else b"", target)

    def _write(self, process_id: int, text: bytes, target: IO[str]) -> None:
        if not text:
            return
        if process_id != 0:
            # On a terminal, clear the progress bar that process 0 may be drawing. Its next update
            # draws it again.
            prefix = (_CLEAR_LINE if target.isatty() else b"") + f"[{process_id}] ".encode()
            # If this process draws a progress bar, keep only its last state.
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
    # The group may be gone already, which some systems report as a PermissionError.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
