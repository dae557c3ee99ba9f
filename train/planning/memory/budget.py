"""Memory budget of devices and hosts, and whether a run's steps fit into it.

This is checked twice before step 0: with the estimate from shapes before anything is compiled, and
with the compiled steps afterwards.
"""

import collections
import dataclasses
import math
import os
import socket
from pathlib import Path
from typing import Any

import jax

from distributed.messages import Exchange
from predict.machines.targets import Target
from predict.memory.memory_estimate import Needs
from predict.program.memory import memory
from predict.program.memory_pressure import memory_pressure
from sharding.compiler_options import NO_REMATERIALIZATION
from sharding.labels import GAPS, LABELS, TEMPORARIES
from sharding.memory import HOST_KIND, MemoryConfig
from train.run.run import Run

#: Fraction of a device's or host's memory that a step may use, unless the config sets a budget.
SHARE = 0.9
#: Allowed error of an estimate. A step whose estimate exceeds the budget by more is not compiled.
TOLERANCE = 0.15
#: A compiled step takes from 1 / this to this times its estimate. A plan may fit if it would with
#: the former, and a remedy leaves room for the latter.
COMPILED = 1.1

_ROWS = (*LABELS[:2], "optimizer", LABELS[2], TEMPORARIES, GAPS, "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that a step may use, the same on all processes."""

    device_bytes: float  # per device; infinite if unknown
    host_bytes: float  # per host
    devices_per_host: int  # the largest number of any host
    device_kind: str  # as in jax.Device.device_kind
    limit_bytes: float = math.inf  # all memory of a device, whatever the config sets


def budget_of(config: MemoryConfig, mesh: jax.sharding.Mesh) -> Budget:
    """Return the budget of a run: from the config, or a fraction of the available memory.

    A CPU's memory is divided by the number of devices that it simulates.

    Args:
        config: may set the budgets.
        mesh: mesh of devices.
    """
    exchange = Exchange()
    hosts = collections.Counter(exchange.words(socket.gethostname()))
    devices = mesh.local_devices

    def local_values() -> list:
        if devices[0].platform == "cpu":  # all simulated devices of a host share its memory
            limits = [host_memory_bytes() / (max(hosts.values()) * len(devices))]
        else:
            limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
        least = min((limit for limit in limits if limit is not None), default=math.inf)
        return [least, host_memory_bytes(), len(devices), devices[0].device_kind]

    limit_bytes, host_bytes, num_devices, kind = exchange.on_first(local_values)
    return Budget(
        device_bytes=_budget_bytes(config.device_budget, limit_bytes),
        host_bytes=_budget_bytes(config.host_budget, host_bytes),
        devices_per_host=max(hosts.values()) * num_devices,
        device_kind=kind,
        limit_bytes=limit_bytes,
    )


def target_budget(config: MemoryConfig, target: Target) -> Budget:
    """Return the budget of target GPUs: from the config, or a fraction of their memory.

    Their hosts are unknown, so host memory is unlimited unless the config limits it.

    Args:
        config: may set the budgets.
        target: GPUs.
    """
    return Budget(
        device_bytes=_budget_bytes(config.device_budget, target.memory_bytes),
        host_bytes=_budget_bytes(config.host_budget, math.inf),
        devices_per_host=target.gpus_per_host,
        device_kind=target.device_kind,
        limit_bytes=target.memory_bytes,
    )


def _budget_bytes(configured_gib: float | None, available_bytes: float) -> float:
    return SHARE * available_bytes if configured_gib is None else configured_gib * 2**30


def pressure_of(run: Run, budget: Budget) -> str:
    """Return a warning if XLA recomputes to save memory or exceeds its limit, else ""."""
    if run.hardware.platform != "gpu" or budget.limit_bytes == math.inf:
        return ""
    if NO_REMATERIALIZATION in run.compiler_options():
        return ""  # XLA kept to no limit, because the step fits
    pressure = memory_pressure(
        run.compile_train_step(),
        device_bytes=int(budget.limit_bytes),
        is_described=run.target is not None,
    )
    return str(pressure or "")


def host_memory_bytes() -> int:
    """Return the memory of this host in bytes, or the limit of this process's control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    cgroup_file = Path("/proc/self/cgroup")
    root = Path("/sys/fs/cgroup")
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            file = directory / ("memory.limit_in_bytes" if controllers else "memory.max")
            if directory.is_relative_to(top) and file.exists():
                limit = file.read_text().strip()
                limits += [int(limit)] if limit.isdecimal() else []
    return min(limits)


def needs_of(run: Run, budget: Budget) -> Needs:
    """Return the estimated memory of a run's step on one device and on one host, by label."""
    estimate = run.estimate_memory()
    host = {label: size * budget.devices_per_host for label, size in estimate.host.items()}
    return Needs(device=estimate.device, host=host)


def fits(needs: Needs, budget: Budget, *, ratio: float = 1.0) -> bool:
    """Return whether a step fits whose device memory is `ratio` times its estimate.

    Host memory is known exactly.
    """
    device_bytes = ratio * needs.device_bytes
    return device_bytes <= budget.device_bytes and needs.host_bytes <= budget.host_bytes


def compiled_bytes(run: Run) -> int | None:
    """Return the bytes that the compiled steps use on a device; None if they are not reported.

    This is the maximum over the training and the evaluation step, and over processes. State that
    the evaluation step does not read stays resident, so it is counted too.
    """
    # XLA for CPUs counts arrays in host memory as device memory.
    is_cpu = run.hardware.platform == "cpu"
    if is_cpu and run.estimate_memory().host_bytes:
        return None
    train = memory(run.compile_train_step()).in_all
    evaluation = memory(run.compile_eval_step()).in_all
    state = run.state_layout.abstract
    read = _device_bytes(run.params_to_evaluate(state))
    unread = _device_bytes((state.params, state.opt_state)) - read
    known = None if train is None or evaluation is None else max(train, unread + evaluation)
    answers = Exchange().words(None if known is None else str(known))
    return None if None in answers else max(int(word) for word in answers if word is not None)


def _device_bytes(state: Any) -> int:
    """Return the bytes that arrays use in the memory of one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
        if leaf.sharding.memory_kind != HOST_KIND
    )


def table(needs: Needs, budget: Budget) -> str:
    """Format needs and budget as a table: a row per label, the sum, and the budget."""
    rows = [(name, needs.device.get(name, 0), needs.host.get(name, 0)) for name in _ROWS]
    rows += [("in all", needs.device_bytes, needs.host_bytes)]
    rows += [("budget", budget.device_bytes, budget.host_bytes)]
    lines = [f"{'memory':14s} {'a device':>14s} {'a host':>14s}   (estimated from shapes)"]
    lines += [f"  {name:12s} {size(device):>14s} {size(host):>14s}" for name, device, host in rows]
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    if num_bytes == math.inf:
        return "not known"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"


def at_least(num_bytes: float) -> str:
    """Format a number of bytes as `size` does, but never as fewer bytes than it is."""
    unit = 2**20 / 10 if num_bytes < 2**30 else 2**30 / 100  # what `size` rounds to
    return size(math.ceil(num_bytes / unit) * unit)
