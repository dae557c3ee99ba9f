"""Allocates and frees the buffers of a running program, and keeps totals and peaks."""

from collections.abc import Mapping

from predict.memory.operations import Value
from predict.memory.packing import Lifetime
from predict.memory.storage import Buffer, Storage
from sharding.labels import TEMPORARIES


class Allocator:
    """Device memory and host memory, of unlimited size.

    A buffer that no value holds is freed. Totals and peaks are kept for device memory and for host
    memory.

    Args:
        mesh_shape: sizes of the mesh axes.

    Attributes:
        at_peak: whether on the host -> the buffers that were live at the peak.
    """

    def __init__(self, mesh_shape: Mapping[str, int]):
        self._mesh_shape = mesh_shape
        self._live: dict[bool, dict[Buffer, None]] = {False: {}, True: {}}
        self._total = {False: 0, True: 0}
        self._peak = {False: 0, True: 0}
        self.at_peak: dict[bool, list[Buffer]] = {False: [], True: []}
        self._buffers: list[Buffer] = []  # all buffers ever allocated

    def allocate(
        self, value: Value, label: str = TEMPORARIES, place: Buffer | None = None
    ) -> Storage:
        """Return a new array in memory; it reuses the buffer `place` if that is free."""
        size = self.size(value)
        if place is not None and place.num_holders == 0:
            if (place.num_bytes, place.on_host) == (size, value.on_host):
                return self.retain(Storage((place,), is_made=True, label=label))
        buffer = Buffer(size, value.on_host, label, start=len(self._buffers))
        self._buffers.append(buffer)
        live = self._live[value.on_host]
        where = value.on_host
        live[buffer] = None
        self._total[where] += buffer.num_bytes
        if self._total[where] > self._peak[where]:
            self._peak[where] = self._total[where]
            self.at_peak[where] = list(live)
        return self.retain(Storage((buffer,), is_made=True, label=label))

    def retain(self, storage: Storage) -> Storage:
        """Add one reference to the buffers of a value, and return the value's storage."""
        for buffer in storage.buffers:
            buffer.num_holders += 1
        return storage

    def release(self, storage: Storage) -> None:
        """Drop one reference to the buffers of a value, and free those without references."""
        for buffer in storage.buffers:
            buffer.num_holders -= 1
            if buffer.num_holders == 0 and not buffer.num_pins:
                del self._live[buffer.on_host][buffer]
                self._total[buffer.on_host] -= buffer.num_bytes
                buffer.end = len(self._buffers)

    def lifetimes(self, at_least: float) -> list[Lifetime]:
        """Return the lifetimes of the device buffers that were allocated during the run.

        Time is measured in buffers allocated so far. Inputs are not included.

        Args:
            at_least: bytes; smaller buffers are left out.
        """
        last = len(self._buffers) + 1
        return [
            Lifetime(buffer.num_bytes, buffer.start, buffer.end or last)
            for buffer in self._buffers
            if not (buffer.is_input or buffer.on_host) and buffer.num_bytes >= at_least
        ]

    def size(self, value: Value) -> int:
        """Return the bytes of a value on one device."""
        return value.num_bytes(self._mesh_shape)

    def live_buffers(self) -> set[Buffer]:
        """Return the buffers that are live now."""
        return {buffer for live in self._live.values() for buffer in live}

    def snapshot(self) -> tuple:
        """Return a snapshot of the live buffers and their references."""
        live = {on_host: dict(buffers) for on_host, buffers in self._live.items()}
        holders = {buffer: buffer.num_holders for buffers in live.values() for buffer in buffers}
        return live, holders, dict(self._total)

    def restore(self, snapshot: tuple) -> None:
        """Restore a snapshot made by `snapshot`."""
        live, holders, total = snapshot
        for on_host, buffers in self._live.items():
            for buffer in buffers.keys() - live[on_host].keys():
                # The output of a branch: the conditional's output is allocated in its place.
                buffer.end = len(self._buffers)
        self._live = {on_host: dict(buffers) for on_host, buffers in live.items()}
        self._total = dict(total)
        for buffer, num_holders in holders.items():
            buffer.num_holders = num_holders
