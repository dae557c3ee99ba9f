"""The devices that a run is planned for: GPUs that are only described, or devices of this machine.

    described GPUs (train/plan.py)     ──┐
                                         ├──> PlanDevices ──> PlanSearch
    devices of a run (train/build.py)  ──┘

They build the runs whose steps are compiled.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from predict.machines.datasheets import machine_of, machine_of_devices
from predict.machines.machine import Machine
from predict.machines.targets import Target
from sharding.memory import AUTO
from train.config.schema import RunConfig
from train.planning.calibration import use_calibration
from train.planning.compiled_step import CompiledStep, compile_and_predict
from train.planning.memory.budget import Budget
from train.run.run import Run

#: Memory of the GPUs that layers are compiled for: more than any step needs, because the memory of
#: a whole step on them is irrelevant.
_MEMORY_BYTES = 2**50


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanDevices:
    """Devices that steps are compiled for, and their rates.

    Attributes:
        name: name in reports, such as "h100:8x8".
        count: number of devices; a plan uses all of them.
        are_described: whether steps are compiled for a description of them.
        machine: their rates.
        budget: memory that a step may use.
        assemble: builds the run of a config on all devices, or raises ValueError.
        assemble_part: builds the run of a config on the first N devices, which have enough memory
            for it, or raises ValueError. The config's mesh has N devices. Its step compiles fast,
            and may be a little slower than a whole run's.
    """

    name: str
    count: int
    are_described: bool
    machine: Machine
    budget: Budget
    assemble: Callable[[RunConfig], Run]
    assemble_part: Callable[[RunConfig, int], Run]

    def compile_whole(self, run: Run) -> CompiledStep:
        """Compile the step of a run from `assemble`, and predict its time."""
        return compile_and_predict(run, self.name, self.machine, self.budget)


class Compilations:
    """Compilations in threads, each of which is started once.

    Args:
        num_threads: how many run at the same time.
    """

    def __init__(self, num_threads: int):
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads)
        self._started: dict[Hashable, concurrent.futures.Future] = {}

    def __enter__(self) -> "Compilations":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, key: Hashable, compile_it: Callable[[], Any]) -> concurrent.futures.Future:
        """Return the future of a compilation, which is started unless the key is known."""
        if key not in self._started:
            self._started[key] = self._pool.submit(compile_it)
        return self._started[key]


def described_devices(
    target: Target, budget: Budget, run_for: Callable[[RunConfig, Target], Run]
) -> PlanDevices:
    """Return GPUs that need not be present.

    Args:
        target: GPUs.
        budget: memory that a step may use.
        run_for: builds the run of a config for a target.
    """
    read_only = dataclasses.replace(target, has_machine_code=False)
    of_parts = dataclasses.replace(read_only, has_triton_kernels=False)

    def assemble(config: RunConfig) -> Run:
        return run_for(_on_device_if_auto(config), read_only)

    def assemble_part(config: RunConfig, num_devices: int) -> Run:
        part = of_parts.resized(num_devices, memory_bytes=_MEMORY_BYTES)
        return run_for(_on_device_if_auto(config), part)

    return PlanDevices(
        name=target.name,
        count=target.num_devices,
        are_described=True,
        machine=machine_of(target),
        budget=budget,
        assemble=assemble,
        assemble_part=assemble_part,
    )


def present_devices(
    devices: Sequence[Any],
    budget: Budget,
    cache_path: Path,
    assemble_on: Callable[[RunConfig, Any], Run],
) -> PlanDevices:
    """Return devices that jax has found.

    Args:
        devices: devices, ordered by host.
        budget: memory that a step may use.
        cache_path: directory in which `calibrate` may have stored their rates.
        assemble_on: builds the run of a config on a mesh.
    """

    def assemble_part(config: RunConfig, num_devices: int) -> Run:
        return assemble_on(_on_device_if_auto(config), config.make_mesh(devices[:num_devices]))

    def assemble(config: RunConfig) -> Run:
        return assemble_part(config, len(devices))

    machine = machine_of_devices(devices, budget.devices_per_host)
    machine = use_calibration(machine, devices, cache_path)
    return PlanDevices(
        name=f"{len(devices)} × {machine.device_kind}",
        count=len(devices),
        are_described=False,
        machine=machine,
        budget=budget,
        assemble=assemble,
        assemble_part=assemble_part,
    )


def _on_device_if_auto(config: RunConfig) -> RunConfig:
    """Return a config whose memory is not planned while the mesh is.

    With `memory.placement=auto`, it is planned for the mesh that is chosen, when a run starts.
    """
    if config.memory.placement != AUTO:
        return config
    return config.with_values({"memory.placement": "device"})
