"""Stopping before the last step, on all processes after the same one.

A signal reaches the processes at different times, or only some of them. So each tells all others
at every step what it wants, and all act on what was told a step ago: nobody waits for an answer.
"""

import logging
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

#: What SLURM and Kubernetes send, what --signal is often set to, and Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_log = logging.getLogger(__name__)


class StopSignals:
    """Remembers that a signal asked this process to stop, from `defer` on. A context manager.

    Before that there is nothing to save, and a signal ends the process. Afterwards the first is
    remembered, and further ones change nothing, but for a second Ctrl-C.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    @property
    def has_received(self) -> bool:
        return self.received is not None

    def defer(self) -> None:
        """From now on a signal is remembered, and the process goes on."""
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {name: signal.signal(name, self._on_signal) for name in SIGNALS}

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if self.received is None:
            self.received = name
            _log.warning("%s: finishing this step, saving, and stopping", name.name)
        elif name == self.received == signal.SIGINT:
            raise KeyboardInterrupt


class Votes:
    """What all processes want, told at every step and known one step later.

    Every process calls `cast` equally often, with as many values.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh, self._pending = mesh, None
        self._by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._max = jax.jit(lambda told: jnp.max(told, axis=0), out_shardings=everywhere)

    def cast(self, *values: int) -> tuple[int, ...]:
        """Returns the largest of what all processes gave for each value at the call before.

        It waits until what was started before that call is computed. The first call gets zeros.

        Args:
            values: of this process, each to be compared with that of the others.
        """
        own = np.asarray([values], np.int32)  # of each of this process's devices
        shape = (self._mesh.size, len(values))
        told = jax.make_array_from_callback(shape, self._by_device, lambda _: own)
        answer, self._pending = self._pending, self._max(told)
        if answer is None:
            return (0,) * len(values)
        return tuple(int(value) for value in np.asarray(answer.addressable_data(0)))


class Timer:
    """Tells when so many minutes have passed, by a clock that nobody sets."""

    def __init__(self, minutes: float | None):
        self._minutes = minutes
        self.restart()

    def restart(self) -> None:
        self._start_s = time.monotonic()

    def is_due(self) -> bool:
        return self._minutes is not None and time.monotonic() - self._start_s >= 60 * self._minutes


def wait_for_all(what: str) -> None:
    """Returns when all processes have called it.

    Args:
        what: names the place, the same for all.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
