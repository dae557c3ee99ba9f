"""Messages and barriers between the processes of a run during training.

A signal reaches the processes at different times, or only some of them. So at every step each
process tells the others in a small collective whether it wants to stop, and all act on the result
of the previous step's collective. No process has to wait for an answer.
"""

import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec


class DelayedAllReduce:
    """The maximum over processes of some integers, exchanged at every step without waiting.

    Every process must call `max` equally often, and with the same number of values.

    Attributes:
        answers: int32[processes, values], the values behind the newest result of `max`.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh = mesh
        self._pending = None
        self._by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda values: values, out_shardings=everywhere)
        processes = [device.process_index for device in mesh.devices.flat]
        _, self._first_rows = np.unique(processes, return_index=True)
        self.answers = np.zeros((len(self._first_rows), 0), np.int32)

    def max(self, *values: int) -> tuple[int, ...]:
        """Return, for each value, the maximum over all processes at the previous call.

        This blocks until the computations that were started before the previous call are done. The
        first call returns zeros.
        """
        local_row = np.asarray([values], np.int32)  # one row for each of this process's devices
        shape = (self._mesh.size, len(values))
        by_device = jax.make_array_from_callback(shape, self._by_device, lambda _: local_row)
        answer = self._pending
        self._pending = self._gather(by_device)
        if answer is None:
            self.answers = np.zeros((len(self._first_rows), len(values)), np.int32)
        else:
            self.answers = np.asarray(answer.addressable_data(0))[self._first_rows]
        return tuple(self.answers.max(axis=0).tolist())


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
