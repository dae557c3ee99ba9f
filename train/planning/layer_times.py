"""Times and memory of a model's layers, from steps that are compiled for few devices.

A plan's step consists of the same layers as a step of one replica without pipeline stages. So that
step is compiled, for one microbatch and the devices of the axes `context`, `expert` and `model`,
and its time is predicted. Devices of `expert` exchange tokens, so they have a microbatch each.
train/planning/plan_cost.py divides the time, and puts the pieces together for a plan:

    forward of the layers | embedding, head, loss | backward of the layers | update

The times do not include waiting for collectives between replicas.
"""

import dataclasses
import math
from functools import cached_property
from typing import NamedTuple

from pipeline.runtime.layers import LAYERS
from predict.time.execution import loops_s
from predict.time.prediction import predict
from sharding.labels import GAPS, TEMPORARIES
from train.config.schema import RunConfig
from train.planning.plan_devices import PlanDevices
from train.run.run import Run


class Split(NamedTuple):
    """Sizes of the mesh axes that divide the work of a layer."""

    context: int
    expert: int
    model: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaStep:
    """The step of one replica that times are read from.

    Attributes:
        context: size of the mesh axis `context`.
        expert: size of the mesh axis `expert`.
        model: size of the mesh axis `model`.
        batch: examples of a microbatch on each device of `expert`.
        remat: value of `train.remat`, without `stage`.
    """

    context: int
    expert: int
    model: int
    batch: int
    remat: str

    @property
    def split(self) -> Split:
        """Sizes of the mesh axes."""
        return Split(self.context, self.expert, self.model)

    @property
    def num_devices(self) -> int:
        """Number of devices that its step is compiled for."""
        return math.prod(self.split)

    def __str__(self) -> str:
        axes = [f"{name}={n}" for name, n in self.split._asdict().items() if n > 1]
        return ", ".join([*axes, *[f"remat {self.remat}"] * (self.remat != "none")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaTimes:
    """Predicted seconds on one device.

    Attributes:
        step_s: whole step.
        forwards_s: forward of the layers of each stack; of one with a single layer, nothing.
    """

    step_s: float
    forwards_s: tuple[float, ...]

    @property
    def forward_s(self) -> float:
        """The forward of all layers."""
        return sum(self.forwards_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMemory:
    """Bytes of one microbatch on one device: activations saved for the backward, and the rest."""

    activations: float
    temporaries: float


class CompiledReplica:
    """A part of a plan, traced or compiled on demand.

    Args:
        part: what to compile.
        devices: devices of the whole run.
    """

    def __init__(self, part: ReplicaStep, config: RunConfig, devices: PlanDevices):
        self.part = part
        self._config = config
        self._devices = devices
        self._times: ReplicaTimes | None = None

    @cached_property
    def run(self) -> Run:
        """The run of the part.

        Raises:
            ValueError: the model cannot be split like this.
        """
        part = self.part
        tensor = self._config.tensor
        values = {f"mesh.{axis}": 1 for axis in ("pipeline", "data", "fsdp")}
        values |= {f"mesh.{axis}": size for axis, size in part.split._asdict().items()}
        values |= {
            "memory.zero_stage": 0,
            "memory.shard_parameters_fraction": 1.0,  # others require zero_stage=3
            "memory.placement": "device",
            "memory.offload_parameters_fraction": 0.0,
            "data.global_batch_size": part.batch * part.expert * tensor.num_replicas(part.model),
            "data.rampup_batch_size": (),
            "train.num_microbatches": 1,
            "train.remat": part.remat,
            "train.unroll": False,
            "pipeline.schedule": "1f1b",
            "pipeline.chunks": 1,
            "pipeline.layers_per_stage": (),
        }
        run = self._devices.assemble_part(self._config.with_values(values), part.num_devices)
        return dataclasses.replace(run, device_budget=math.inf)

    @property
    def times(self) -> ReplicaTimes:
        """Predicted times of the compiled step."""
        # A cached_property has one lock for all objects before Python 3.12: parts that threads
        # compile would wait for each other.
        if self._times is None:
            self._times = self._compiled_times()
        return self._times

    def _compiled_times(self) -> ReplicaTimes:
        text = self.run.compile_train_step().as_text() or ""
        prediction = predict(text, dict(self.run.mesh.shape), self._devices.machine)
        # One forward loop per stack. XLA may rename the backward loops when it pipelines their
        # collectives, so these are not looked for.
        loops = loops_s(prediction.run, LAYERS)[: len(self.run.functions.num_layers)]
        return ReplicaTimes(step_s=prediction.step_s, forwards_s=tuple(loops))

    @cached_property
    def memory(self) -> ReplicaMemory:
        """Estimated memory of the traced step, without parameters, optimizer and gradients."""
        device = self.run.estimate_memory().device
        return ReplicaMemory(
            activations=device.get("activations", 0),
            temporaries=device.get(TEMPORARIES, 0) + device.get(GAPS, 0),
        )
