"""Describes GPUs by the rates that their vendors state, and a CPU by those measured for a core."""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from predict.machines.machine import Machine
from predict.machines.targets import Target


class _Datasheet(NamedTuple):
    """The rates of one device.

    Attributes:
        tflops_per_s: peak dense TFLOP/s in (bfloat16, float16, float32, float8); None if the vendor
            states none.
        gb_per_s: GB/s of (device memory, link to the host, links to other devices); links in one
            direction. None if no step is predicted for such devices.
        network_gbit_per_s: network adapters of the usual host in Gbit/s per GPU: NVIDIA's DGX-1 has
            four adapters of 100 Gbit/s for eight GPUs, DGX A100 one of 200 for each, later ones one
            of 400.
    """

    tflops_per_s: tuple[float | None, ...]
    gb_per_s: tuple[float, float, float] | None = None
    network_gbit_per_s: float = 400.0


_A100 = (312.0, 312.0, 156.0, None)
_H100 = (989.5, 989.5, 494.5, 1979.0)
_H100_NVL = (835.5, 835.5, 417.5, 1671.0)
# Pattern of device_kind -> rates. The first pattern that matches counts, so variants of a chip come
# before the chip.
_DATASHEETS = {
    r"\bMIG\b": _Datasheet((None, None, None, None)),  # a slice of a chip
    r"\bV100-PCIE\b": _Datasheet((None, 112.0, 14.0, None), (900.0, 15.8, 150.0), 50.0),
    r"\bV100\b": _Datasheet((None, 125.0, 15.7, None), (900.0, 15.8, 150.0), 50.0),
    r"\bA100\b.*40GB": _Datasheet(_A100, (1555.0, 31.5, 300.0), 200.0),
    r"\bA100\b": _Datasheet(_A100, (2039.0, 31.5, 300.0), 200.0),
    r"\bH100 PCIe\b": _Datasheet((756.0, 756.0, 378.0, 1513.0), (2000.0, 63.0, 63.0)),
    r"\bH200 NVL\b": _Datasheet(_H100_NVL, (4800.0, 63.0, 450.0)),
    r"\bH200\b": _Datasheet(_H100, (4800.0, 63.0, 450.0)),
    # The link to the host is NVLink-C2C.
    r"\bGH200\b.*144G": _Datasheet(_H100, (4900.0, 450.0, 450.0)),
    r"\bGH200\b": _Datasheet(_H100, (4000.0, 450.0, 450.0)),
    r"\bH100 NVL\b": _Datasheet(_H100_NVL, (3350.0, 63.0, 450.0)),
    r"\bG?H100\b": _Datasheet(_H100, (3350.0, 63.0, 450.0)),
    r"\bB200\b": _Datasheet((2250.0, 2250.0, 1125.0, 4500.0), (8000.0, 63.0, 900.0)),
    r"\bL4\b": _Datasheet((121.0, 121.0, 60.5, 242.5), (300.0, 31.5, 31.5)),
    r"\bL40S\b": _Datasheet((362.0, 362.0, 183.0, 733.0), (864.0, 31.5, 31.5)),
    r"\bRTX 4090$": _Datasheet((165.2, 165.2, 82.6, 330.3), (1008.0, 31.5, 31.5)),
    r"\bMI300X\b": _Datasheet((1307.4, 1307.4, 653.7, 2614.9), (5300.0, 63.0, 448.0)),
    r"^TPU v4$": _Datasheet((275.0, None, None, None)),
    r"^TPU v5 ?(lite|e)$": _Datasheet((197.0, None, None, None)),
    r"^TPU v5p?$": _Datasheet((459.0, None, None, None)),
    r"^TPU v6 ?(lite|e)$": _Datasheet((918.0, None, None, None)),
}
#: XLA's name of an element type -> its dtype.
_DTYPES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
#: Devices of which the table has no rates count as this one.
_NOMINAL = "NVIDIA A100-SXM4-80GB"
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


def peak_flops_per_s(device_kind: str, dtype: Any) -> float | None:
    """Return the peak FLOP/s that the vendor states for a device; None if unknown (CPUs).

    The figures are for dense matrix products, never the doubled figures for sparse ones. float32
    means TF32 if the chip has it, because XLA uses TF32 there by default. The figures of the RTX
    4090 are with float32 accumulation.

    Args:
        device_kind: as in jax.Device.device_kind.
        dtype: dtype of the matrix products' operands: bfloat16, float16, float32, float8_e4m3fn or
            float8_e5m2.

    Source: NVIDIA's datasheets of V100, A100, H100, H200, L4 and L40S (sparse figures halved), of
        HGX B200 (per GPU), and the Ada architecture whitepaper, appendix A (RTX 4090); AMD's
        MI300X datasheet; Google Cloud's TPU system architecture pages (per chip, bfloat16 only).
    """
    names = ("bfloat16", "float16", "float32", "float8")
    name = jnp.dtype(dtype).name.partition("_")[0]
    datasheet = _datasheet(device_kind)
    if datasheet is None or name not in names:
        return None
    peak = datasheet.tflops_per_s[names.index(name)]
    return None if peak is None else peak * 1e12


def machine_of(target: Target) -> Machine:
    """Return the datasheet rates of a target's GPUs; an A100's if they are unknown."""
    return datasheet_machine(
        target.device_kind, target.gpus_per_host, network_gbit_per_s=target.network_gbit_per_s
    )


def machine_of_devices(devices: Sequence[Any], per_host: int) -> Machine:
    """Return the rates of devices that jax has found.

    Args:
        per_host: number of devices per host.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return _cpu_machine(kind, min(per_host, len(devices)))
    return datasheet_machine(kind, per_host)


def datasheet_machine(
    device_kind: str,
    per_host: int,
    *,
    dtype: Any = jnp.float32,
    network_gbit_per_s: float | None = None,
) -> Machine:
    """Return the datasheet rates of devices, or an A100's if they are unknown.

    Args:
        device_kind: as in jax.Device.device_kind.
        per_host: number of devices per host.
        dtype: type of the products that matter most. Devices whose peak is not known in float32, or
            in this type if it has 16 bits, count as an A100.
        network_gbit_per_s: bandwidth between hosts in Gbit/s per GPU; None: as in the usual hosts.

    Source: NVIDIA's and AMD's datasheets of the devices; PCIe by its generation. A GH200's links
        are of NVLink: 900 GB/s in both directions together, to the host and to other GPUs.
    """
    needed = {jnp.dtype(jnp.float32), jnp.dtype(dtype)}
    stated = [peak_flops_per_s(device_kind, each) for each in needed if each.itemsize <= 4]
    datasheet = _datasheet(device_kind)
    if datasheet is None or datasheet.gb_per_s is None or None in stated:
        device_kind = _NOMINAL
        datasheet = _DATASHEETS[r"\bA100\b"]
    assert datasheet.gb_per_s is not None
    memory, host, link = (1e9 * rate for rate in datasheet.gb_per_s)
    has_switch = not re.search(_WITHOUT_SWITCH, device_kind) or per_host > len(_CUBE_MESH)
    peaks = {short: peak_flops_per_s(device_kind, dtype) for short, dtype in _DTYPES.items()}
    return Machine(
        device_kind=device_kind,
        # A V100 has no bfloat16, and computes such products in float32. No GPU older than Ada has
        # float8, but there XLA does not multiply in it either.
        flops_per_s={short: peak for short, peak in peaks.items() if peak is not None},
        memory_bytes_per_s=memory,
        host_bytes_per_s=host,
        link_bytes_per_s=link,
        gpus_per_host=per_host,
        network_bytes_per_s=(network_gbit_per_s or datasheet.network_gbit_per_s) * 1e9 / 8,
        links=None if has_switch else _CUBE_MESH,
    )


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


def _datasheet(device_kind: str) -> _Datasheet | None:
    matching = (sheet for pattern, sheet in _DATASHEETS.items() if re.search(pattern, device_kind))
    return next(matching, None)
