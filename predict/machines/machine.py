"""Describes the hardware of a predicted step by its rates."""

import dataclasses
from collections.abc import Mapping, Sequence

#: Least time of a kernel, from its start to the start of the next one. XLA's model has no such
#: minimum, and estimates nanoseconds for scalars. A rule of thumb for sequences of small kernels,
#: not measured.
KERNEL_S = 2e-6
#: Least time of a collective, within a host and across hosts: NCCL's kernels synchronize in a few
#: steps of a few microseconds each. XLA's table of permutations begins at 13 us.
COLLECTIVE_LATENCY_S = 15e-6
NETWORK_LATENCY_S = 30e-6
#: Share of the peak FLOP/s that a large matrix product reaches: XLA's tables say 0.79 for bfloat16
#: products of 8192x4096x4096 on an H100, and less for smaller ones.
MATMUL_EFFICIENCY = 0.7
#: Share of the memory bandwidth that kernels reach when they stream through large arrays: about
#: 3.0 of an H100's 3.35 TB/s.
MEMORY_EFFICIENCY = 0.9
#: Share of the host link that copies of pinned memory reach: about 50 of PCIe 5.0's 63 GB/s.
HOST_EFFICIENCY = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with devices, described by the rates of one device: a GPU's from its datasheet.

    Attributes:
        device_kind: name of the device, such as "NVIDIA H100 80GB HBM3".
        flops_per_s: XLA's name of the operands' element type -> peak FLOP/s of matrix products.
            Types that are not listed use "f32".
        memory_bytes_per_s: bandwidth of the GPU's memory.
        host_bytes_per_s: bandwidth of its link to the host, in one direction.
        link_bytes_per_s: bandwidth of all its links to other GPUs of its host, in one direction.
        gpus_per_host: partitions 0 .. gpus_per_host - 1 of a program are on the first host, etc.
        network_bytes_per_s: its share of the host's network adapters, in one direction.
        kernel_s: least time of a kernel.
        collective_latency_s: least time of a collective within a host.
        network_latency_s: least time of a collective across hosts.
        shares_cores: whether the devices are simulated on the cores of one CPU. A stage that waits
            then leaves its cores to the others, so a pipeline has no bubble. The rates are per
            device, while all devices are busy.
        allocation_s_per_byte: seconds for each byte of memory that a step allocates and gives back.
            The system clears such memory for every step of simulated devices; a GPU keeps it.
        links: number of links between each two GPUs of a host; None if a switch connects them, so
            that a GPU reaches any other with all its links.
    """

    device_kind: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    gpus_per_host: int
    network_bytes_per_s: float
    kernel_s: float = KERNEL_S
    collective_latency_s: float = COLLECTIVE_LATENCY_S
    network_latency_s: float = NETWORK_LATENCY_S
    shares_cores: bool = False
    allocation_s_per_byte: float = 0.0
    links: tuple[tuple[int, ...], ...] | None = None

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak FLOP/s of a product whose operands have this element type."""
        return self.flops_per_s.get(dtype, self.flops_per_s["f32"])

    def memory_s(self, num_bytes: float) -> float:
        """Return the time in which kernels read or write so many bytes of large arrays."""
        return num_bytes / (MEMORY_EFFICIENCY * self.memory_bytes_per_s)

    def host_copy_s(self, num_bytes: float) -> float:
        """Return the time to copy so many bytes between the device and pinned host memory."""
        return num_bytes / (HOST_EFFICIENCY * self.host_bytes_per_s)

    def product_s(self, dtype: str, flops: float, num_bytes: float) -> float:
        """Return the time of a large matrix product.

        Args:
            dtype: element type of its operands, as in `flops_per_s`.
            flops: multiplications and additions.
            num_bytes: bytes that it reads and writes.
        """
        compute_s = flops / self.peak_flops_per_s(dtype) / MATMUL_EFFICIENCY
        moved_s = self.memory_s(num_bytes)
        if self.shares_cores:
            return compute_s + moved_s  # a CPU packs the operands before it multiplies
        return max(compute_s, moved_s)

    def group_bytes_per_s(self, group: Sequence[int]) -> float:
        """Return the bandwidth of the links over which a group of GPUs communicates in its hosts.

        Without a switch, these are the links between the members of the group, and the member with
        the fewest decides. GPUs without a link to each other use the link to the host:

            links ((0, 1, 2, 0),    group (0, 1)        1 of 3 links: a third of link_bytes_per_s
                   (1, 0, 0, 2),    group (0, 1, 2, 3)  3 of 3 links: link_bytes_per_s
                   (2, 0, 0, 1),    group (0, 3)        no link: host_bytes_per_s
                   (0, 2, 1, 0))

        Args:
            group: numbers of the devices.
        """
        if self.links is None:
            return self.link_bytes_per_s
        rate = self.link_bytes_per_s
        for device in group:
            host, place = divmod(device, self.gpus_per_host)
            peers = [p % self.gpus_per_host for p in group if p // self.gpus_per_host == host]
            if len(peers) > 1:
                links = self.links[place]
                shared = sum(links[peer] for peer in peers) / sum(links)
                rate = min(rate, shared * self.link_bytes_per_s or self.host_bytes_per_s)
        return rate
