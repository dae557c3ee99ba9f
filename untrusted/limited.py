"""Runs our code on a stranger's data or program in processes with limits.

A few bytes can make a library run for hours, allocate all memory, or abort the process from native
code, where no exception handler helps. Such work runs in a process of its own, which the kernel
ends at its limits, and the caller gets a ValueError of one sentence:

    parent                                     process with limits
      starts it with the name of a function ─▶   imports the function, limits its memory
      argument, as JSON ─────────────────────▶   limits the processor time of this call
      ["value", result] ◀────────────────────    calls the function
      ["error", sentence] ◀──────────────────    the function raised a ValueError
      end of the stream ◀────────────────────    it ran out of a limit, or crashed

Nothing is unpickled at either end. The process gets neither the environment of its parent, which
may contain passwords, nor its open files, and it does not import jax unless its function does.
"""

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from untrusted.limited_process import (
    HEADER,
    OUT_OF_MEMORY,
    READY,
    TOO_LONG,
    Limits,
    as_bytes,
    read,
)
from untrusted.messages import shortened

#: Environment variables that a process may need to start, to find its libraries, and for the time.
_ENVIRONMENT = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
#: Threads of libraries would each take a part of the memory.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# -I ignores the environment and the current directory, whose folder "data" may not be ours.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from untrusted.limited_process import Limits, serve; "
    "serve(int(sys.argv[2]), sys.argv[3], Limits(**json.loads(sys.argv[4])))"
)
_START_TIMEOUT_S = 120.0


class LimitExceeded(ValueError):
    """Raised when a call exceeds a limit, or ends the process that it runs in."""


def run_limited(function: Callable[[Any], Any], argument: Any, subject: str, limits: Limits) -> Any:
    """Call a function once, in a process with limits; see `LimitedProcesses`."""
    processes = LimitedProcesses(function, limits)
    try:
        return processes.call(argument, subject)
    finally:
        processes.close()


class LimitedProcesses:
    """Processes that call a function with limits; they start when they are needed.

    A process that exceeds a limit is replaced by a new one at the next call. Threads may call at
    the same time. After a fork, and in a process that gets this object pickled, new processes are
    started. They end with this object, and with the process that it is in, even if that is killed.

    Args:
        function: function of a module, which takes and returns a JSON value. It raises a
            ValueError of one sentence for data that it refuses.
        num_processes: maximum number of processes, and so of calls at the same time; others
            wait.
    """

    def __init__(self, function: Callable[[Any], Any], limits: Limits, *, num_processes: int = 1):
        self._function = function
        self._limits = limits
        self._num_processes = num_processes
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        """Forget all processes, which belong to another process or do not exist yet."""
        self._free = threading.BoundedSemaphore(self._num_processes)
        self._idle: list[_Process] = []
        self._processes: set[_Process] = set()
        self._finalizer = weakref.finalize(self, _end, self._processes, os.getpid())

    def __reduce__(self) -> Any:
        new = functools.partial(LimitedProcesses, num_processes=self._num_processes)
        return new, (self._function, self._limits)

    def call(self, argument: Any, subject: str) -> Any:
        """Call the function, and return the JSON value that it returns.

        Args:
            argument: JSON value; strings may have lone surrogates, and numbers may be NaN.
            subject: source of the argument, such as a file; errors begin with it.

        Raises:
            LimitExceeded: The call exceeded a limit, or ended its process.
            ValueError: The function raised an error, or the argument is nested too deeply.
            OSError: The process cannot start.
        """
        try:
            content = as_bytes(argument)
        except RecursionError:
            raise ValueError(f"{subject} has values that are nested too deeply") from None
        with self._free:
            reply = self._reply(content, subject)
        try:
            kind, value = json.loads(reply.decode("utf-8", "surrogatepass"))
        except RecursionError:
            raise ValueError(f"{subject} has a result that is nested too deeply") from None
        if kind == "value":
            return value
        raise ValueError(value if kind == "error" else f"{subject} cannot be used ({value})")

    def _reply(self, content: bytes, subject: str) -> bytes:
        while True:
            process = self._idle.pop() if self._idle else None
            if process is None:
                process = _Process(self._function, self._limits)
                self._processes.add(process)
            elif process.has_ended():  # while nobody used it
                self._remove(process)
                continue
            try:
                reply = process.reply_to(content, subject)
            except BaseException:  # also KeyboardInterrupt: a late reply must meet no other call
                self._remove(process)
                raise
            self._idle.append(process)
            return reply

    def _remove(self, process: "_Process") -> None:
        process.end()
        self._processes.discard(process)

    def close(self) -> None:
        """End the processes; a further call starts new ones."""
        self._finalizer()
        self._reset()

    def _after_fork(self) -> None:
        for process in self._processes:
            process.socket.close()  # or the parent's end would not be the last one
        self._finalizer.detach()
        self._reset()


_pools: weakref.WeakSet[LimitedProcesses] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in [*_pools]:
        pool._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _end(processes: "set[_Process]", owner: int) -> None:
    if os.getpid() == owner:
        while processes:  # also those that other threads are still adding
            processes.pop().end()


class _Process:
    """A process with limits, seen from its parent."""

    def __init__(self, function: Callable[[Any], Any], limits: Limits):
        self._limits = limits
        self.socket, theirs = socket.socketpair()
        # Our own folders come first; a user's folder of the same name may follow.
        paths = [str(Path(__file__).parents[1]), *(str(path) or os.getcwd() for path in sys.path)]
        arguments = [
            json.dumps(paths),
            str(theirs.fileno()),
            f"{function.__module__}:{function.__qualname__}",
            json.dumps(dataclasses.asdict(limits)),
        ]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs, tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOTSTRAP, *arguments],
                pass_fds=[theirs.fileno()],
                env=environment | _ONE_THREAD,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
            theirs.close()  # so that the stream ends if the process does
            try:
                ready = self._receive(time.monotonic() + _START_TIMEOUT_S)
            except (OSError, ValueError):
                ready = None
            if ready != READY:
                self.end()
                output.seek(0)
                problem = output.read(2**16).decode("utf-8", "replace").strip()
                raise OSError(
                    f"a process that runs {arguments[2]} with limits cannot start: "
                    f"{shortened(problem.splitlines()[-1] if problem else 'it ended')}"
                )

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def reply_to(self, content: bytes, subject: str) -> bytes:
        """Return the reply to a message."""
        deadline = time.monotonic() + self._limits.wall_s
        try:
            self.socket.settimeout(self._limits.wall_s)
            self.socket.sendall(HEADER.pack(len(content)) + content)
            return self._receive(deadline)
        except TimeoutError:
            problem = f"takes more than {self._limits.wall_s:g} s"
        except OSError:
            problem = self._cause_of_end()
        raise LimitExceeded(f"{subject} {problem}") from None

    def _cause_of_end(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "stops the process that reads it"
        if -code == signal.SIGPROF:
            return f"takes more than {self._limits.cpu_s:g} s of processor time"
        if code == OUT_OF_MEMORY:
            return f"takes more than {self._limits.memory_bytes // 2**20:,} MiB of memory"
        if code == TOO_LONG:
            return f"has a result of more than {self._limits.reply_bytes // 2**20:,} MiB"
        if -code == signal.SIGKILL:
            return "needs a process that was killed, as happens if a computer runs out of memory"
        try:
            cause = signal.Signals(-code).name
        except ValueError:
            cause = f"exit code {code}"
        return f"crashes the process that reads it ({cause})"

    def _receive(self, deadline: float) -> bytes:
        (size,) = HEADER.unpack(read(self.socket, HEADER.size, deadline))
        if size > self._limits.reply_bytes:
            raise OSError("the reply is too long")
        return read(self.socket, size, deadline)

    def end(self) -> None:
        """End the process, whatever it does."""
        self.socket.close()
        self._process.kill()
        self._process.wait()
