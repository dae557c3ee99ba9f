"""Rates of devices, and the step times that follow: good enough to rank plans, not to forecast."""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from predict.machines.machine import Machine
from predict.machines.targets import Target
from predict.memory.step_cost import StepCost
from train.reporting.throughput import peak_flops_per_s

#: Fraction of the peak that matrix products of large models reach; see docs/benchmarks.md.
_REACHED = 0.5

# Pattern of device_kind -> GB/s of (device memory, link to the host, links to other devices); links
# in one direction. The first pattern that matches counts.
_GB_PER_S: dict[str, tuple[float, float, float]] = {
    r"\bV100\b": (900.0, 15.8, 150.0),
    r"\bA100\b.*40GB": (1555.0, 31.5, 300.0),
    r"\bA100\b": (2039.0, 31.5, 300.0),
    r"\bH200\b": (4800.0, 63.0, 450.0),
    r"\bH100 PCIe\b": (2000.0, 63.0, 63.0),
    r"\bG?H100\b": (3350.0, 63.0, 450.0),
    r"\bB200\b": (8000.0, 63.0, 900.0),
    r"\bL4\b": (300.0, 31.5, 31.5),
    r"\bL40S\b": (864.0, 31.5, 31.5),
    r"\bRTX 4090$": (1008.0, 31.5, 31.5),
    r"\bMI300X\b": (5300.0, 63.0, 448.0),
}
# Pattern of device_kind -> network adapters of the usual host in Gbit/s per GPU: NVIDIA's DGX-1 has
# four adapters of 100 Gbit/s for eight GPUs, DGX A100 one of 200 for each, later ones one of 400.
_NETWORK_GBIT_PER_S = {r"\bV100\b": 50.0, r"\bA100\b": 200.0, "": 400.0}
# A core of a CPU, as `train.plan --calibrate` measures it on two cores that simulate 8 devices:
# peak FLOP/s of float32 products, bytes per second in memory and in collectives, least times of an
# operation and of a collective, seconds for each byte that is allocated.
_CORE_FLOPS_PER_S = 5e10
_CORE_BYTES_PER_S = 14e9
_CORE_LINK_BYTES_PER_S = 8e9
_CORE_KERNEL_S = 2.5e-6
_CORE_COLLECTIVE_S = 250e-6
_CORE_ALLOCATION_S_PER_BYTE = 0.6e-9
# Between processes: gloo over TCP.
_CPU_NETWORK_BYTES_PER_S = 1e9
_CPU_NETWORK_LATENCY_S = 1e-3
# Number of NVLink connections between each two GPUs of a V100's usual host of eight: the hybrid
# cube mesh of NVIDIA's DGX-1. Hosts of 16 have a switch, as hosts of later GPUs do. Source: NVIDIA,
# "DGX-1 with Tesla V100 system architecture" (2017), section on NVLink.
_CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
_WITHOUT_SWITCH = r"\bV100-SXM"
#: Devices whose datasheet is not in the table count as this one.
_NOMINAL = "NVIDIA A100-SXM4-80GB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device computes and moves data."""

    device_kind: str  # device whose rates these are
    flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float

    def step_time_s(self, work: StepCost) -> float:
        """Return the time of the work in seconds, without any overlap.

        A matrix product takes as long as its FLOPs or its memory traffic, whichever is longer.
        Element-wise operations and collectives that the compiler inserts are not counted.

        Args:
            work: matrix products, host copies and explicit collectives of a step.
        """
        products = sum(
            times * max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)
            for (flops, num_bytes), times in work.products.items()
        )
        moved = work.host_bytes / self.host_bytes_per_s
        return products + moved + work.network_bytes / self.network_bytes_per_s


def machine_of(target: Target) -> Machine:
    """Return the datasheet rates of a target's GPUs; an A100's if they are unknown."""
    return _gpu_machine(target.device_kind, target.gpus_per_host, target.network_gbit_per_s)


def machine_of_devices(devices: Sequence[Any], per_host: int) -> Machine:
    """Return the rates of devices that jax has found.

    Args:
        per_host: number of devices per host.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return _cpu_machine(kind, min(per_host, len(devices)))
    return _gpu_machine(kind, per_host, None)


def _cpu_machine(kind: str, per_host: int) -> Machine:
    """Return the rates of one of `per_host` devices that this machine's cores simulate."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = (cores or 1) / per_host
    return Machine(
        device_kind=kind,
        flops_per_s={"f32": share * _CORE_FLOPS_PER_S, "f64": share * _CORE_FLOPS_PER_S / 2},
        memory_bytes_per_s=share * _CORE_BYTES_PER_S,
        host_bytes_per_s=share * _CORE_BYTES_PER_S,
        link_bytes_per_s=share * _CORE_LINK_BYTES_PER_S,
        gpus_per_host=per_host,
        network_bytes_per_s=_CPU_NETWORK_BYTES_PER_S,
        kernel_s=_CORE_KERNEL_S / share,
        collective_latency_s=_CORE_COLLECTIVE_S / share,
        network_latency_s=_CPU_NETWORK_LATENCY_S,
        shares_cores=per_host > 1,
        allocation_s_per_byte=_CORE_ALLOCATION_S_PER_BYTE / share,
    )


def _gpu_machine(device_kind: str, per_host: int, network_gbit_per_s: float | None) -> Machine:
    known = rates_of(device_kind, "float32")
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    names |= {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
    usual = (rate for key, rate in _NETWORK_GBIT_PER_S.items() if re.search(key, known.device_kind))
    gbit_per_s = network_gbit_per_s or next(usual)
    has_switch = not re.search(_WITHOUT_SWITCH, known.device_kind)
    has_switch |= per_host > len(_CUBE_MESH)
    peaks = {short: peak_flops_per_s(known.device_kind, name) for short, name in names.items()}
    return Machine(
        device_kind=known.device_kind,
        # A V100 has no bfloat16, and computes such products in float32. No GPU older than Ada has
        # float8, but there XLA does not multiply in it either.
        flops_per_s={short: peak for short, peak in peaks.items() if peak is not None},
        memory_bytes_per_s=known.memory_bytes_per_s,
        host_bytes_per_s=known.host_bytes_per_s,
        link_bytes_per_s=known.network_bytes_per_s,
        gpus_per_host=per_host,
        network_bytes_per_s=gbit_per_s * 1e9 / 8,
        links=None if has_switch else _CUBE_MESH,
    )


def rates_of(device_kind: str, dtype: Any) -> Rates:
    """Return the rates of a device, or an A100's if they are unknown.

    Args:
        device_kind: as in jax.Device.device_kind.
        dtype: dtype of matrix products; wider ones count as float32.

    Source: NVIDIA's and AMD's datasheets of the devices; PCIe by its generation.
    """
    name = "float32" if jnp.dtype(dtype).itemsize > 2 else jnp.dtype(dtype).name
    for kind in (device_kind, _NOMINAL):
        stated = peak_flops_per_s(kind, name)
        for pattern, gb_per_s in _GB_PER_S.items():
            if stated is not None and re.search(pattern, kind):
                memory, host, network = (1e9 * rate for rate in gb_per_s)
                return Rates(
                    device_kind=kind,
                    flops_per_s=_REACHED * stated,
                    memory_bytes_per_s=memory,
                    host_bytes_per_s=host,
                    network_bytes_per_s=network,
                )
    raise AssertionError(f"{_NOMINAL} has no {name} rate")
