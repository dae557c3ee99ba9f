"""The hardware that a step is compiled for, as the devices of its mesh describe it.

Kernels and chunk sizes depend on the device that will run the step, which need not be one that this
process has: a step for an H100 may be compiled on a laptop. So code that chooses between them asks
`current()` and never jax's own backend. `use(hardware_of(device))` sets the answer around a trace.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of a mesh.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      device_kind: the vendor's name, such as "NVIDIA H100 80GB HBM3".
      compute_capability: of an NVIDIA GPU, such as 9.0; 0 for every other device.
    """

    platform: str
    device_kind: str
    compute_capability: float = 0.0

    @property
    def runs_on_cpu(self) -> bool:
        """Whether to choose what suits CPUs: for a CPU, and where the hardware is not known."""
        return self.platform in ("cpu", "any")


#: What a function is traced for outside any run, such as a converted model that is called directly:
#: only operations that every device has.
ANY = Hardware(platform="any", device_kind="any device")

_current: contextvars.ContextVar[Hardware] = contextvars.ContextVar("hardware", default=ANY)


def current() -> Hardware:
    """Returns the hardware that the function being traced is for."""
    return _current.get()


@contextlib.contextmanager
def use(hardware: Hardware) -> Iterator[None]:
    """Traces everything within the block for this hardware."""
    token = _current.set(hardware)
    try:
        yield
    finally:
        _current.reset(token)


def hardware_of(device: Any) -> Hardware:
    """Returns the hardware that a `jax.Device` is, or that a description stands for."""
    # "9.0" on NVIDIA, a name such as "gfx942" elsewhere, absent on CPUs.
    version = str(getattr(device, "compute_capability", ""))
    is_number = version.replace(".", "", 1).isdigit()
    return Hardware(
        platform=device.platform,
        device_kind=device.device_kind,
        compute_capability=float(version) if is_number else 0.0,
    )
