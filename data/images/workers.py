"""Processes that read for this one: they have no jax, and end when this one does.

Python's own pools start each process by importing the program again, jax and all, and leave
processes behind when the program is killed. These are started with nothing but a socket: whoever
of the two sees the other's end closed ends too.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

_Worker = tuple[subprocess.Popen, Any]  # the process, and our end of the socket

# A signal to all processes of a job is the run's to answer, which may want further batches.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# A worker whose socket was closed ends after what it is at.
_END_TIMEOUT_S = 10.0
# Arguments of a call that takes many.
_MAX_SHARE = 16


class Workers:
    """Worker processes, started at the first call.

    Args:
        num_workers: How many.
        targets: By name, the objects whose methods they call; each worker gets a copy.
        setting: Names what sets their number, for messages.
    """

    def __init__(self, num_workers: int, targets: Mapping[str, object], setting: str):
        self.num_workers = num_workers
        self._targets, self._setting = targets, setting
        self._lock = threading.Lock()
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._threads: ThreadPoolExecutor | None = None

    def shares(self, arguments: Sequence[Any]) -> list[Sequence[Any]]:
        """Returns the arguments in parts for calls that take many.

        There are parts for all workers, of an even number of arguments each, so that pairs stay
        together, and of few, so that all workers end at about the same time.
        """
        share = -(-len(arguments) // self.num_workers)
        size = min(share + share % 2, _MAX_SHARE)
        return [arguments[start : start + size] for start in range(0, len(arguments), size)]

    def map(self, target: str, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Returns what a method of a target returns for each of the arguments, in order.

        Raises:
            RuntimeError: A worker ended by itself.
            Exception: What the method raised.
        """
        threads = self._start()
        calls = [threads.submit(self._call, (target, method, argument)) for argument in arguments]
        return [call.result() for call in calls]

    def _start(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                content = pickle.dumps(self._targets, protocol=5)
                workers = [_start_worker() for _ in range(self.num_workers)]
                # Whatever ends this object, or the program, ends them.
                weakref.finalize(self, _end, workers)
                for worker in workers:
                    worker[1].send_bytes(content)
                    self._idle.put(worker)
                self._targets = {}  # Which may refer to this object, and keep it alive.
                self._threads = ThreadPoolExecutor(self.num_workers, "workers")
            return self._threads

    def _call(self, call: tuple[str, str, Any]) -> Any:
        process, connection = worker = self._idle.get()
        try:
            connection.send_bytes(pickle.dumps(call, protocol=5))
            is_error, returned = _receive(connection)
        except (EOFError, OSError) as error:
            self._idle.put(worker)  # For the next call to fail in the same way, and not to wait.
            code = process.poll() if process.poll() is not None else "unknown"
            raise RuntimeError(
                f"a process of {self._setting} ended by itself (exit code {code}; -9 is a kill, "
                "as for want of memory); its messages are above, and fewer of them need less memory"
            ) from error
        self._idle.put(worker)
        if is_error:
            raise returned
        return returned


def _start_worker() -> _Worker:
    ours, theirs = Pipe()
    # What this program can import, the worker can.
    paths = [path or os.getcwd() for path in sys.path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        # A function of the user's may import jax, and must leave the accelerators alone.
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        # -P: a folder of the user's with a name of ours is not taken for ours.
        [sys.executable, "-P", "-m", "data.images.workers", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return process, ours


def _end(workers: Sequence[_Worker]) -> None:
    for _, connection in workers:
        connection.close()
    for process, _ in workers:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _send(connection: Any, value: Any) -> None:
    """Sends a value whose arrays are not copied on the way."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps((content, [view.nbytes for view in views])))
    for view in views:
        connection.send_bytes(view)


def _receive(connection: Any) -> Any:
    content, sizes = pickle.loads(connection.recv_bytes())
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        connection.recv_bytes_into(buffer)
    return pickle.loads(content, buffers=buffers)


def _work(connection: Any) -> None:
    """Answers calls until the other end is closed."""
    targets = pickle.loads(connection.recv_bytes())
    while True:
        try:
            target, method, argument = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = False, getattr(targets[target], method)(argument)
        except Exception as error:
            answer = True, _portable(error)
        try:
            _send(connection, answer)
        except OSError:  # The other end is gone.
            return


def _portable(error: Exception) -> Exception:
    """Returns the error with where it was raised, as one that can be sent."""
    error.add_note(f"in a process that reads:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Of errors with attributes of their own.
        return RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return error


def main() -> None:
    """Works for the process at the other end of the socket that the command line names."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        try:
            _work(connection)
        except (EOFError, ConnectionResetError):
            pass


if __name__ == "__main__":
    main()
