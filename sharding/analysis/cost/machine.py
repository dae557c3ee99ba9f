"""Describes the hardware of a predicted step by rates from datasheets."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with GPUs, described by the rates of one GPU from its datasheet.

    Attributes:
        device_kind: name of the GPU, such as "NVIDIA H100 80GB HBM3".
        flops_per_s: XLA's name of the operands' element type -> peak FLOP/s of matrix products.
            Types that are not listed use "f32".
        memory_bytes_per_s: bandwidth of the GPU's memory.
        host_bytes_per_s: bandwidth of its link to the host, in one direction.
        link_bytes_per_s: bandwidth of its links to the other GPUs of its host, in one direction.
        gpus_per_host: partitions 0 .. gpus_per_host - 1 of a program are on the first host, etc.
        network_bytes_per_s: its share of the host's network adapters, in one direction.
    """

    device_kind: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    gpus_per_host: int
    network_bytes_per_s: float

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak FLOP/s of a product whose operands have this element type."""
        return self.flops_per_s.get(dtype, self.flops_per_s["f32"])
