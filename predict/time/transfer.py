"""Estimates how long a collective takes, from the bandwidths of links and networks.

Within a host, GPUs are connected by NVLink, either through a switch or by links between some of
them; each GPU also has a share of the host's network adapters. A collective moves its bytes through
a ring: the slower of the two kinds of connection that the ring contains decides.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from predict.machines.machine import Machine
from predict.program.device_groups import Groups

#: Share of NVLink's bandwidth that NCCL reaches: XLA's table for an H100 says 344 of 450 GB/s for
#: an all-gather of 2.9 GB over 8 GPUs.
LINK_EFFICIENCY = 0.75
#: Share of a network adapter's bandwidth that NCCL reaches across hosts: assumed.
NETWORK_EFFICIENCY = 0.85
#: XLA's estimate of a collective is capped at this multiple of the estimate made here. XLA assumes
#: 22 GB/s for a permutation across hosts, and 111 of NVLink's 450 GB/s for one within a host.
MOST_OF_ESTIMATE = 2.0


def transfer_s(
    machine: Machine, kind: str, groups: Groups, num_bytes: float, given_s: float | None = None
) -> float:
    """Return the time of a collective in seconds.

    Args:
        machine: hardware.
        kind: one of `asynchrony.COLLECTIVES`.
        groups: devices of each group; consecutive ones are on the same host.
        num_bytes: bytes of the collective's output on one device.
        given_s: XLA's estimate, if there is one. It is kept between the time at the links' full
            bandwidth and a multiple of ours.
    """
    if all(len(set(group)) < 2 for group in groups):
        return 0.0
    num_hosts = max(_num_hosts(group, machine.gpus_per_host) for group in groups)
    size = max(len(group) for group in groups)
    link_rate = min(machine.group_bytes_per_s(group) for group in groups)
    usual_s, best_s = _wire_s(machine, kind, size, num_hosts, num_bytes, link_rate)
    seconds = usual_s if given_s is None else min(max(given_s, best_s), MOST_OF_ESTIMATE * usual_s)
    latency_s = machine.network_latency_s if num_hosts > 1 else machine.collective_latency_s
    if machine.shares_cores:
        # A device waits until the others of its group have had their turn on the cores. XLA lets a
        # permutation on CPUs wait for all devices.
        is_whole = kind == "collective-permute" or size >= machine.gpus_per_host
        share = 1.0 if is_whole else size / machine.gpus_per_host
        return seconds + share * latency_s
    return max(seconds, latency_s)


def group_over(mesh_shape: Mapping[str, int], axes: Iterable[str]) -> tuple[int, ...]:
    """Return the devices that differ from device 0 along the given mesh axes only.

    Args:
        mesh_shape: sizes of the mesh axes, in mesh order.
        axes: names of mesh axes.
    """
    numbers = np.arange(math.prod(mesh_shape.values())).reshape(*mesh_shape.values())
    index = tuple(slice(None) if axis in {*axes} else 0 for axis in mesh_shape)
    return tuple(numbers[index].reshape(-1).tolist())


def crosses_hosts(mesh_shape: Mapping[str, int], axes: Iterable[str], gpus_per_host: int) -> bool:
    """Return whether devices that differ along the given mesh axes are on several hosts.

    Args:
        mesh_shape: sizes of the mesh axes, in mesh order.
        axes: names of mesh axes.
        gpus_per_host: number of devices per host.
    """
    group = group_over(mesh_shape, axes)
    return _num_hosts(group, gpus_per_host) > 1


def _num_hosts(group: tuple[int, ...], gpus_per_host: int) -> int:
    return len({device // gpus_per_host for device in group}) or 1


def _wire_s(
    machine: Machine, kind: str, size: int, num_hosts: int, num_bytes: float, link_rate: float
) -> tuple[float, float]:
    """Return (seconds at NCCL's usual efficiency, seconds at the links' full bandwidth).

    Args:
        machine: hardware.
        kind: one of `asynchrony.COLLECTIVES`.
        size: number of GPUs in a group.
        num_hosts: number of hosts of a group.
        num_bytes: bytes of the collective's output on one GPU.
        link_rate: bandwidth of the links within a host, in bytes per second.
    """
    per_host = size / num_hosts
    moved = _sent_bytes(kind, size, num_bytes)
    link_s = moved / link_rate
    network_s = 0.0
    if num_hosts > 1 and kind in ("all-to-all", "ragged-all-to-all"):
        # Each GPU sends the data for other hosts through its own network adapter.
        network_s = num_bytes * (size - per_host) / size / machine.network_bytes_per_s
    elif num_hosts > 1:
        # Rings leave a host through the adapters of all GPUs of the group on that host.
        per_host = 1 if kind == "collective-permute" else per_host
        network_s = moved / (per_host * machine.network_bytes_per_s)
    usual_s = max(link_s / LINK_EFFICIENCY, network_s / NETWORK_EFFICIENCY)
    return usual_s, max(link_s, network_s)


def _sent_bytes(kind: str, size: int, num_bytes: float) -> float:
    """Return the bytes that each GPU sends in a group of `size` GPUs.

    Args:
        kind: one of `asynchrony.COLLECTIVES`.
        size: number of GPUs in a group.
        num_bytes: bytes of the collective's output on one GPU.
    """
    others = (size - 1) / size
    if kind == "all-reduce":
        return 2 * others * num_bytes
    if kind == "reduce-scatter":
        return (size - 1) * num_bytes
    if kind in ("collective-permute", "collective-broadcast"):
        return num_bytes
    return others * num_bytes  # all-gather, all-to-all
