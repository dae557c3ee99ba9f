"""Stops a run on a signal, on all processes after the same step.

A signal reaches the processes at different times, or only some of them. So at every step each
process tells the others in a small collective whether it wants to stop, and all act on the result
of the previous step's collective. No process has to wait for an answer.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from train.lifecycle.exit_codes import STOPPED

#: Sent by SLURM and Kubernetes; often chosen with sbatch's --signal; Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_log = logging.getLogger(__name__)


class StopSignals:
    """A context manager that records signals that ask this process to stop, after `defer`.

    Before `defer` there is nothing to save, and a signal ends the process. Afterwards the first
    signal is recorded and further ones are ignored, except for a second Ctrl-C, which raises
    KeyboardInterrupt.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._is_deferred = False

    def watch_start(self) -> None:
        """Until `defer`, let SIGTERM and SIGUSR1 end the process immediately with code STOPPED.

        Python runs signal handlers only between two instructions of the main thread, which may be
        compiling for minutes. So a thread waits for the signals.
        """
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        for name in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(name, lambda number, frame: None)

        def wait() -> None:
            while number := os.read(receiving, 1):
                if not self._is_deferred and number[0] in (signal.SIGTERM, signal.SIGUSR1):
                    name = signal.Signals(number[0]).name
                    with contextlib.suppress(OSError):
                        os.write(2, f"{name}: stopping before the first step\n".encode())
                    os._exit(STOPPED)

        threading.Thread(target=wait, daemon=True, name="signals").start()

    def __enter__(self) -> "StopSignals":
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    @property
    def has_received(self) -> bool:
        """Whether a signal was received."""
        return self.received is not None

    def defer(self) -> None:
        """Record signals from now on, instead of ending the process."""
        self._is_deferred = True
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._before = {name: signal.signal(name, self._on_signal) for name in SIGNALS}

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if self.received is None:
            self.received = name
            _log.warning("%s: finishing this step, saving, and stopping", name.name)
        elif name == self.received == signal.SIGINT:
            raise KeyboardInterrupt


class DelayedAllReduce:
    """The maximum over processes of some integers, exchanged at every step without waiting.

    Every process must call `max` equally often, and with the same number of values.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh = mesh
        self._pending = None
        self._by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._max = jax.jit(lambda values: jnp.max(values, axis=0), out_shardings=everywhere)

    def max(self, *values: int) -> tuple[int, ...]:
        """Return, for each value, the maximum over all processes at the previous call.

        This blocks until the computations that were started before the previous call are done. The
        first call returns zeros.

        Args:
            values: this process's values.
        """
        own = np.asarray([values], np.int32)  # one row for each of this process's devices
        shape = (self._mesh.size, len(values))
        by_device = jax.make_array_from_callback(shape, self._by_device, lambda _: own)
        answer = self._pending
        self._pending = self._max(by_device)
        if answer is None:
            return (0,) * len(values)
        return tuple(int(value) for value in np.asarray(answer.addressable_data(0)))


class Timer:
    """Tells when a number of minutes has passed, by a monotonic clock."""

    def __init__(self, minutes: float | None):
        self._minutes = minutes
        self.restart()

    def restart(self) -> None:
        """Start the interval again."""
        self._start_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether the interval is over; always False if no interval is set."""
        return self._minutes is not None and time.monotonic() - self._start_s >= 60 * self._minutes


def wait_for_all(what: str) -> None:
    """Block until all processes have called this function.

    Args:
        what: name of this barrier, the same on all processes.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
