"""Describes the hardware that a step is compiled for, taken from the devices of its mesh.

Kernels and chunk sizes depend on the device that will run the step. This process may have no such
device: a step for an H100 can be compiled on a laptop. Code that chooses between kernels therefore
asks `current()` and never jax's default backend. `use(hardware_of(device))` sets the answer for a
trace.
"""

import contextlib
import contextvars
import dataclasses
from typing import Any

from sharding.context_values import bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of a mesh.

    Attributes:
        platform: "cpu", "gpu" or "tpu"; "any" if it is not known.
        device_kind: vendor's name, such as "NVIDIA H100 80GB HBM3".
        compute_capability: of an NVIDIA GPU, such as 9.0; 0 for every other device.
    """

    platform: str
    device_kind: str
    compute_capability: float = 0.0

    @property
    def runs_on_cpu(self) -> bool:
        """Whether to choose the CPU variant: on CPUs and on unknown hardware."""
        return self.platform in ("cpu", "any")


#: The hardware outside of any run, e.g. when a converted model is called directly: only operations
#: that every device supports.
ANY = Hardware(platform="any", device_kind="any device")

_current: contextvars.ContextVar[Hardware] = contextvars.ContextVar("hardware", default=ANY)


def current() -> Hardware:
    """Return the hardware that the current trace is for."""
    return _current.get()


def use(hardware: Hardware) -> contextlib.AbstractContextManager:
    """Trace everything within the block for this hardware."""
    return bound(_current, hardware)


def hardware_of(device: Any) -> Hardware:
    """Return the hardware of a `jax.Device` or of a device description."""
    # "9.0" on NVIDIA, a name such as "gfx942" elsewhere, absent on CPUs.
    version = str(getattr(device, "compute_capability", ""))
    is_number = version.replace(".", "", 1).isdigit()
    return Hardware(
        platform=device.platform,
        device_kind=device.device_kind,
        compute_capability=float(version) if is_number else 0.0,
    )
