"""Whether a step fits its devices and hosts: known before step 0, from shapes and as compiled."""

import collections
import dataclasses
import math
import os
import socket
from pathlib import Path
from typing import Any

import jax

from sharding.analysis.audit import memory
from sharding.analysis.memory_pressure import memory_pressure
from sharding.analysis.targets import Target
from sharding.distributed.messages import Exchange
from sharding.estimate.memory_estimate import GAPS, LABELS, TEMPORARIES, Needs
from sharding.memory import HOST_KIND, MemoryConfig
from train.run.build import Run

#: Of what a device or a host has, the share that a step may take unless the config says more.
SHARE = 0.9
#: How far an estimate may lie beside the compiled step: what is further over is not compiled.
TOLERANCE = 0.15

_ROWS = (*LABELS[:2], "optimizer", LABELS[2], TEMPORARIES, GAPS, "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What there is, the same on all processes."""

    device_bytes: float  # of each device; infinite where that is not known
    host_bytes: float  # of each host
    devices_per_host: int  # of those that have most
    device_kind: str  # of each device
    limit_bytes: float = math.inf  # of each device, all of it, whatever the config says


def budget_of(config: MemoryConfig, mesh: jax.sharding.Mesh) -> Budget:
    """Returns a run's budget: what the config says, or a share of what there is."""
    exchange = Exchange()
    hosts = collections.Counter(exchange.words(socket.gethostname()))
    devices = mesh.local_devices

    def own() -> list:
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
        least = min((limit for limit in limits if limit is not None), default=math.inf)
        return [least, host_memory_bytes(), len(devices), devices[0].device_kind]

    device_bytes, host_bytes, num_devices, kind = exchange.on_first(own)
    limit_bytes = device_bytes
    device_bytes, host_bytes = SHARE * device_bytes, SHARE * host_bytes
    if config.device_budget is not None:
        device_bytes = config.device_budget * 2**30
    if config.host_budget is not None:
        host_bytes = config.host_budget * 2**30
    return Budget(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        devices_per_host=max(hosts.values()) * num_devices,
        device_kind=kind,
        limit_bytes=limit_bytes,
    )


def target_budget(config: MemoryConfig, target: Target) -> Budget:
    """Returns the budget of GPUs that are not there: what the config says, or a share of theirs.

    Nothing is known of their hosts, so host memory is unlimited unless the config limits it.
    """
    given = config.device_budget, config.host_budget
    return Budget(
        device_bytes=SHARE * target.memory_bytes if given[0] is None else given[0] * 2**30,
        host_bytes=math.inf if given[1] is None else given[1] * 2**30,
        devices_per_host=target.gpus_per_host,
        device_kind=target.device_kind,
        limit_bytes=target.memory_bytes,
    )


def pressure_of(run: Run, budget: Budget) -> str:
    """Returns a warning if XLA had to recompute, or lacked memory; "" if not, or if not known."""
    if run.hardware.platform != "gpu" or budget.limit_bytes == math.inf:
        return ""
    found = memory_pressure(
        run.train_step,
        device_bytes=int(budget.limit_bytes),
        is_described=run.target is not None,
    )
    return str(found or "")


def host_memory_bytes() -> int:
    """Returns the memory of this host, or what its control group leaves this process of it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    own, root = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
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
    """Returns what a run's step takes of one device and of one host, from shapes alone."""
    host = {k: v * budget.devices_per_host for k, v in run.estimate.host.items()}
    return Needs(device=run.estimate.device, host=host)


def excess(needs: Needs, budget: Budget, *, device_bytes: float | None = None) -> float:
    """Returns how many times what there is a step takes, of devices or hosts, whichever is more.

    Args:
        device_bytes: of one device, if something is known beside the needs.
    """
    device = needs.device_bytes if device_bytes is None else device_bytes
    return max(device / budget.device_bytes, needs.host_bytes / budget.host_bytes)


def compiled_bytes(run: Run) -> int | None:
    """Returns what the compiled steps take of a device, None where the compiler does not tell.

    It is the most that any process is told. Beside an evaluation's step lies what that does not
    read of the state. A compiler for CPUs takes the host's memory for the device's.
    """
    is_cpu = run.hardware.platform == "cpu"
    if is_cpu and run.estimate.host_bytes:
        return None
    train, evaluation = (memory(step).in_all for step in (run.train_step, run.eval_step))
    state = run.state.abstract
    unread = _device_bytes((state.params, state.opt_state)) - _device_bytes(run.evaluated(state))
    known = None if train is None or evaluation is None else max(train, unread + evaluation)
    told = Exchange().words(None if known is None else str(known))
    return None if None in told else max(int(word) for word in told if word is not None)


def _device_bytes(state: Any) -> int:
    """Returns the bytes of one device that arrays take, beside those in host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
        if leaf.sharding.memory_kind != HOST_KIND
    )


def table(needs: Needs, budget: Budget) -> str:
    """Returns a row for each label, their sum, and the budget."""
    rows = [(name, needs.device.get(name, 0), needs.host.get(name, 0)) for name in _ROWS]
    rows += [("in all", needs.device_bytes, needs.host_bytes)]
    rows += [("budget", budget.device_bytes, budget.host_bytes)]
    lines = [f"{'memory':14s} {'a device':>14s} {'a host':>14s}   (estimated from shapes)"]
    lines += [f"  {name:12s} {size(device):>14s} {size(host):>14s}" for name, device, host in rows]
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Returns a number of bytes for people."""
    if num_bytes == math.inf:
        return "not known"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"
