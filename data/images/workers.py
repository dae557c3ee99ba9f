"""Worker processes that read images, do not import jax, and end when their parent ends.

Python's own process pools import the main program, including jax, in each process, and leave
processes behind when the program is killed. These workers are started with nothing but a socket to
their parent. A worker ends when it sees the other end of the socket closed, which the operating
system does even if the parent is killed. If a worker ends, the parent's next call raises an error.

    parent                                    worker
      pickled targets  ───────────────────▶    unpickles them once
      (target, method, argument)  ────────▶    calls the method
      (is_error, result)  ◀────────────────    sends the result, with arrays as raw buffers
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

_Worker = tuple[subprocess.Popen, Any]  # The process, and the parent's end of the socket.

# Workers ignore signals sent to all processes of a job. The training process handles them, and may
# need more batches before it stops.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# Seconds that a worker has to finish its current call after its socket is closed.
_END_TIMEOUT_S = 10.0
# Maximum number of rows that one call reads.
_MAX_SHARE = 16


class Workers:
    """A pool of worker processes, which are started at the first call.

    Args:
        targets: name -> object whose methods can be called; each worker gets a pickled copy.
        setting: setting that decides the number of workers, such as "images.num_workers=2",
            for messages.
    """

    def __init__(self, num_workers: int, targets: Mapping[str, object], setting: str):
        self.num_workers = num_workers
        self._targets = targets
        self._setting = setting
        self._lock = threading.Lock()
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._threads: ThreadPoolExecutor | None = None

    def shares(self, arguments: Sequence[Any]) -> list[Sequence[Any]]:
        """Split arguments into parts for calls that take a list of them.

        Parts have an even number of arguments, so that pairs stay together. They have at most 16
        arguments, and there are enough parts for all workers, so that all workers finish at about
        the same time.
        """
        share = -(-len(arguments) // self.num_workers)
        size = min(share + share % 2, _MAX_SHARE)
        return [arguments[start : start + size] for start in range(0, len(arguments), size)]

    def map(self, target: str, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call a method of a target in the workers, once per argument.

        Args:
            arguments: argument of each call.

        Raises:
            RuntimeError: A worker process ended unexpectedly.
            Exception: Any exception that the method raised in the worker.
        """
        threads = self._start()
        calls = [threads.submit(self._call, (target, method, argument)) for argument in arguments]
        return [call.result() for call in calls]

    def _start(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                content = pickle.dumps(self._targets, protocol=5)
                workers = [_start_worker() for _ in range(self.num_workers)]
                # End the workers when this object is garbage collected, or when Python exits.
                weakref.finalize(self, _end, workers)
                for worker in workers:
                    worker[1].send_bytes(content)
                    self._idle.put(worker)
                # The targets may refer to this object; dropping them breaks that cycle.
                self._targets = {}
                self._threads = ThreadPoolExecutor(self.num_workers, "workers")
            return self._threads

    def _call(self, call: tuple[str, str, Any]) -> Any:
        process, connection = worker = self._idle.get()
        try:
            connection.send_bytes(pickle.dumps(call, protocol=5))
            is_error, returned = _receive(connection)
        except (EOFError, OSError) as error:
            # Put the dead worker back, so that the next call fails too instead of waiting forever.
            self._idle.put(worker)
            code = process.poll() if process.poll() is not None else "unknown"
            raise RuntimeError(
                f"a worker process of {self._setting} ended unexpectedly (exit code {code}; -9 "
                "means that it was killed, for example when memory ran out); see its output above, "
                "or set fewer workers to save memory"
            ) from error
        self._idle.put(worker)
        if is_error:
            raise returned
        return returned


def _start_worker() -> _Worker:
    ours, theirs = Pipe()
    # The worker can import everything that this program can import.
    paths = [path or os.getcwd() for path in sys.path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        # A user's function may import jax, which must not touch the accelerators.
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        # -P keeps the current directory out of sys.path, where a user's folder may be called
        # "data" like our package.
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
    """Send a value without copying its arrays: pickle protocol 5 sends them as separate buffers."""
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
    """Answer calls until the parent closes its end of the socket."""
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
        except OSError:  # The parent has closed its end.
            return


def _portable(error: Exception) -> Exception:
    """Add the traceback to an error as a note, and replace it if it cannot be pickled."""
    error.add_note(f"in a worker process:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Errors with attributes of their own may not survive pickling.
        return RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return error


def main() -> None:
    """Run a worker process; its argument is the file descriptor of the socket to the parent."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        try:
            _work(connection)
        except (EOFError, ConnectionResetError):
            pass


if __name__ == "__main__":
    main()
