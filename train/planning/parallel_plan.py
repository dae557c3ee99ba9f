"""The plans that `python -m train.plan` chooses from: meshes and all that depends on them.

A plan sets every value that changes how fast a step is, how much memory it takes, or both, and no
value that changes a result. Values that the user sets on the command line are kept.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

from pipeline.config import BALANCED
from pipeline.schedule import SCHEDULES
from sharding.mesh import AXES, MeshConfig
from sharding.tensor import TensorConfig, modes_of
from train.config.remat import AUTO_REMAT, Remat
from train.config.schema import RunConfig, validate_config

#: Axes that a plan divides the devices over, unless they are fixed. The other axes are `fsdp`,
#: which is 1 because `data` with ZeRO 3 does the same, and `expert` if the model has no experts.
_OPEN_AXES = ("pipeline", "data", "context", "expert", "model")
#: Sequences are divided over `context` if at least this many tokens are left on each device. With
#: fewer, `data` or `model` divides the work of a layer as well, and moves fewer bytes.
_CONTEXT_TOKENS = 8192
#: Placeholder values with which a config is validated before it is planned, because its own values
#: may not fit the devices.
UNPLANNED: Mapping[str, Any] = {
    "mesh.pipeline": 1,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.context": 1,
    "mesh.expert": 1,
    "mesh.model": 1,
    "train.num_microbatches": 1,
    "pipeline.chunks": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.layers_per_stage": (),
    "pipeline.share_vocab": False,
    "tensor.mode": "1d",
    "tensor.depth": 1,
    "train.unroll": False,
}
#: Keys that a plan sets. A plan without a pipeline sets no keys of the section `pipeline`, and
#: one in the mode `1d` none of the section `tensor`.
SETTINGS = (
    *(f"mesh.{axis}" for axis in AXES),
    "tensor.mode",
    "tensor.depth",
    "train.num_microbatches",
    "train.remat",
    "train.unroll",
    "memory.zero_stage",
    "memory.placement",
    "pipeline.schedule",
    "pipeline.chunks",
    "pipeline.layers_per_stage",
    "pipeline.share_vocab",
)
#: (pipeline.schedule, pipeline.chunks) to try with several stages. `gpipe` takes as long as `1f1b`
#: and keeps more activations.
TRIED_SCHEDULES = (
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zero_bubble", 1),
    ("zbv", 2),
)
#: Tables of more operations than this are not tried: the largest that a published job used has
#: 48 microbatches of 4 chunks on 8 stages.
_MAX_OPERATIONS = 4096


def open_config(given: Any, fixed: Collection[str]) -> RunConfig:
    """Return the config of a run to plan, with placeholders for settings that are not fixed.

    Args:
        given: ConfigDict of the run, which is changed.
        fixed: keys of the config that stay as they are.

    Raises:
        ValueError: the config is not valid, or the schedule is a table in a file.
    """
    values = {key: value for key, value in UNPLANNED.items() if key not in fixed}
    if "tensor.depth" in fixed and "mesh.model" in values:
        values["mesh.model"] = given.tensor.depth
    with given.ignore_type():
        given.update_from_flattened_dict(values)
    name = given.pipeline.schedule
    if name.endswith(".csv"):
        raise ValueError(
            f"pipeline.schedule={name!r} cannot be planned, because its table fixes the number of "
            f"stages and microbatches; name one of {', '.join(SCHEDULES)}"
        )
    return validate_config(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """One way to run a step."""

    mesh: MeshConfig
    tensor: TensorConfig
    num_microbatches: int
    schedule: str
    chunks: int
    layers_per_stage: tuple[str, ...]  # () or BALANCED
    share_vocab: bool
    remat: Remat
    unroll: bool
    zero_stage: int
    placement: str

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the parameters, each with different tokens."""
        return self._num_batch_parts * self.mesh.context

    @property
    def _num_batch_parts(self) -> int:
        """Number of groups of devices that have different examples."""
        return self.mesh.num_replicas * self.tensor.num_replicas(self.mesh.model)

    @property
    def effective_zero_stage(self) -> int:
        """The ZeRO stage that the plan amounts to: `mesh.fsdp` is stage 3, too."""
        if self.num_replicas == 1:
            return 0
        return 3 if self.mesh.fsdp > 1 else self.zero_stage

    @property
    def shape(self) -> tuple[MeshConfig, TensorConfig, str, int, int]:
        """Mesh, schedule, chunks and microbatches; the rest decides mostly about the memory."""
        return self.mesh, self.tensor, self.schedule, self.chunks, self.num_microbatches

    def microbatch_size(self, global_batch_size: int) -> int:
        """Return the number of examples of a microbatch on one replica."""
        return global_batch_size // (self._num_batch_parts * self.num_microbatches)

    def in_other_modes(self, global_batch_size: int) -> Iterator["ParallelPlan"]:
        """Yield the plan in each other mode of tensor parallelism that divides `mesh.model`.

        A mode that also divides the examples has fewer microbatches if the batch requires it.
        """
        for tensor in modes_of(self.mesh.model):
            other = dataclasses.replace(self, tensor=tensor, num_microbatches=1)
            size = other.microbatch_size(global_batch_size)
            if tensor != self.tensor and size * other._num_batch_parts == global_batch_size:
                count = max(n for n in _divisors(size) if n <= self.num_microbatches)
                yield dataclasses.replace(other, num_microbatches=count)

    def settings(self) -> dict[str, Any]:
        """Return the plan as values of a config: `section.key` -> value."""
        values: dict[str, Any] = {f"mesh.{axis}": n for axis, n in self.mesh.sizes.items()}
        if self.tensor.mode != "1d":
            values |= {"tensor.mode": self.tensor.mode, "tensor.depth": self.tensor.depth}
        values |= {
            "train.num_microbatches": self.num_microbatches,
            "train.remat": str(self.remat),
            "train.unroll": self.unroll,
            "memory.zero_stage": self.zero_stage,
            "memory.placement": self.placement,
        }
        if self.mesh.pipeline > 1:
            values |= {
                "pipeline.schedule": self.schedule,
                "pipeline.chunks": self.chunks,
                "pipeline.layers_per_stage": self.layers_per_stage,
                "pipeline.share_vocab": self.share_vocab,
            }
        return values

    def applied(self, config: RunConfig) -> RunConfig:
        """Return a config with the values of this plan."""
        return config.with_values(self.settings())

    def __str__(self) -> str:
        parts = [str(self.mesh)]
        depth = f"({self.tensor.depth})" if self.tensor.depth > 1 else ""
        parts += [f"tensor {self.tensor.mode}{depth}"] * (self.tensor.mode != "1d")
        if self.mesh.pipeline > 1:
            chunks = f"({self.chunks})" if self.chunks > 1 else ""
            parts.append(f"{self.schedule}{chunks}")
            parts += ["balanced stages"] * (self.layers_per_stage == BALANCED)
            parts += ["shared vocab"] * self.share_vocab
        parts.append(f"{self.num_microbatches} microbatches")
        parts += [f"ZeRO {self.zero_stage}"] * (self.zero_stage > 0)
        # With one stage, there is next to nothing between the two passes of a microbatch.
        remat = str(self.remat) if self.mesh.pipeline > 1 else self.remat.layers
        parts += [f"remat {remat}"] * (remat != "none")
        parts += ["unrolled"] * self.unroll
        parts += ["state in host memory"] * (self.placement == "host")
        return ", ".join(parts)


def with_open_choices(
    config: RunConfig, fixed: Collection[str]
) -> tuple[RunConfig, Collection[str]]:
    """Return a config and its fixed keys for a search, which chooses what runs would choose.

    Args:
        fixed: keys of the config that stay as they are, but for `train.remat=auto` and
            `train.unroll=None`.
    """
    is_open = {
        "train.remat": config.train.remat == AUTO_REMAT,
        "train.unroll": config.train.unroll is None,
    }
    if is_open["train.remat"]:
        config = config.with_values({"train.remat": "stage,dots"})
    return config, {*fixed} - {key for key, value in is_open.items() if value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """All plans of a config for a number of devices.

    Attributes:
        num_devices: number of devices; a plan uses all of them.
        fixed: keys of the config that stay as they are, such as "mesh.model".
        num_layers: number of layers of the model.
        layer_remats: values of `train.remat` to try, with and without `stage` before them.
        allows: whether the model can be split over the axes `context`, `expert` and `model` of a
            mesh.
        has_experts: whether `mesh.expert` divides experts of the model.
        sees_whole_batch: whether all examples of a replica must be in one microbatch.
        can_share_vocab: whether stages can divide embedding and head among them.
        cuts: values of `pipeline.layers_per_stage` to try for a number of chunks, and for a value
            of `pipeline.share_vocab`.
        max_microbatches: largest number of microbatches to try; None: any.
    """

    config: RunConfig
    num_devices: int
    fixed: Collection[str]
    num_layers: int
    layer_remats: tuple[str, ...]
    allows: Callable[[MeshConfig], bool]
    has_experts: bool
    sees_whole_batch: bool
    can_share_vocab: bool
    cuts: Callable[[int, bool], Collection[tuple[str, ...]]]
    max_microbatches: int | None = None

    def __iter__(self) -> Iterator[ParallelPlan]:
        """Yield every plan; whether one fits into memory is not checked here.

        Stages with very different numbers of layers are left out, unless there is no other plan.
        """
        for is_uneven in (False, True):
            has_plan = False
            for plan in self._all(is_uneven):
                has_plan = True
                yield plan
            if has_plan:
                return

    def _all(self, is_uneven: bool) -> Iterator[ParallelPlan]:
        for mesh in self.meshes():
            for count in self._microbatch_counts(mesh):
                for pipeline in self._pipelines(mesh, count, is_uneven):
                    yield from self._plans(mesh, count, pipeline)

    def meshes(self) -> Iterator[MeshConfig]:
        """Yield every mesh that has all devices and divides the model and the batch."""
        config = self.config
        sizes = [self._sizes(axis) for axis in AXES]
        for parts in _products(sizes, self.num_devices):
            mesh = MeshConfig(**dict(zip(AXES, parts, strict=True)))
            batch = config.data.global_batch_size
            is_divided = self._replicas(mesh) and batch % self._replicas(mesh) == 0
            has_stages = mesh.pipeline <= (1 if config.train.unroll else self.num_layers)
            if is_divided and has_stages and self.allows(mesh):
                yield mesh

    def _replicas(self, mesh: MeshConfig) -> int:
        """Return the number of groups with different examples; 0 if the mode has no such mesh."""
        try:
            return mesh.num_replicas * self.config.tensor.num_replicas(mesh.model)
        except ValueError:
            return 0

    def _sizes(self, axis: str) -> tuple[int, ...]:
        configured_size = self.config.mesh.sizes[axis]
        is_fixed = f"mesh.{axis}" in self.fixed
        if configured_size != -1 and (is_fixed or axis not in _OPEN_AXES):
            return (1,) if axis == "fsdp" and not is_fixed else (configured_size,)
        if axis == "expert" and not self.has_experts:
            return (1,)
        data = self.config.data
        max_size = self.num_devices
        if axis == "context" and not is_fixed:
            max_size = 1 if data.reads_images else data.sequence_length // _CONTEXT_TOKENS
        return tuple(size for size in _divisors(self.num_devices) if size <= max(1, max_size))

    def _microbatch_counts(self, mesh: MeshConfig) -> list[int]:
        configured_count = self.config.train.num_microbatches
        replicas = self._replicas(mesh)
        counts = _divisors(self.config.data.global_batch_size // replicas)
        sizes = self.config.data.batch_sizes
        counts = [n for n in counts if sizes.undivided_size(n, replicas) is None]
        if "train.num_microbatches" in self.fixed:
            return [configured_count] if configured_count in counts else []
        if self.sees_whole_batch:
            return [count for count in counts if count == 1]
        max_count = self.max_microbatches
        return [count for count in counts if max_count is None or count <= max_count]

    def _pipelines(
        self, mesh: MeshConfig, num_microbatches: int, is_uneven: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the fields of a plan that describe its stages."""
        is_vocab_shared = self.config.pipeline.share_vocab
        is_open = mesh.pipeline > 1 and "pipeline.share_vocab" not in self.fixed
        shared = (False, True) if is_open and self.can_share_vocab else (is_vocab_shared,)
        for schedule, chunks in self._schedules(mesh, num_microbatches):
            for share_vocab in shared:
                for cut in self._cuts(mesh, chunks, share_vocab, is_uneven):
                    yield {
                        "schedule": schedule,
                        "chunks": chunks,
                        "layers_per_stage": cut,
                        "share_vocab": share_vocab,
                    }

    def _schedules(self, mesh: MeshConfig, num_microbatches: int) -> list[tuple[str, int]]:
        if mesh.pipeline == 1:
            return [("1f1b", 1)]
        return [
            (name, chunks)
            for name, chunks in self._open_schedules()
            if self.num_layers >= mesh.pipeline * chunks
            and mesh.pipeline * chunks * num_microbatches <= _MAX_OPERATIONS
            and (name != "interleaved_1f1b" or num_microbatches % mesh.pipeline == 0)
        ]

    def _open_schedules(self) -> list[tuple[str, int]]:
        """Return the schedules with their chunks, as far as neither is fixed."""
        pipeline = self.config.pipeline
        schedules = [*TRIED_SCHEDULES]
        if "pipeline.chunks" in self.fixed:
            if pipeline.chunks > 1:
                schedules.append(("interleaved_1f1b", pipeline.chunks))
            schedules = [pair for pair in schedules if pair[1] == pipeline.chunks]
        if "pipeline.schedule" in self.fixed:
            schedules = [pair for pair in schedules if pair[0] == pipeline.schedule]
            schedules = schedules or [(pipeline.schedule, pipeline.chunks)]
        return [*dict.fromkeys(schedules)]

    def _cuts(
        self, mesh: MeshConfig, chunks: int, share_vocab: bool, is_uneven: bool
    ) -> Collection[tuple[str, ...]]:
        """Return the values of `pipeline.layers_per_stage` to try."""
        configured_cut = self.config.pipeline.layers_per_stage
        if configured_cut not in ((), BALANCED):  # the number of layers of each chunk
            divides = len(configured_cut) == mesh.pipeline * chunks
            return [configured_cut] * (divides and sum(map(int, configured_cut)) == self.num_layers)
        if mesh.pipeline == 1 or "pipeline.layers_per_stage" in self.fixed:
            return [configured_cut]
        cuts = self.cuts(mesh.pipeline * chunks, share_vocab)
        # Stages that the user asks for are cut as evenly as they can be, however uneven that is.
        is_uneven |= "mesh.pipeline" in self.fixed
        return [BALANCED] if not cuts and is_uneven else cuts

    def _plans(
        self, mesh: MeshConfig, count: int, pipeline: Mapping[str, Any]
    ) -> Iterator[ParallelPlan]:
        config = self.config
        configured_remat = config.train.parsed_remat
        remats = [configured_remat]
        if "train.remat" not in self.fixed:
            has_stages = mesh.pipeline > 1
            flags = (False, True) if has_stages else (configured_remat.recomputes_stages,)
            remats = [
                Remat(recomputes_stages=recomputes, layers=layers)
                for recomputes, layers in itertools.product(flags, self.layer_remats)
            ]
        is_open = config.memory.shard_parameters_fraction == 1  # others require zero_stage=3
        is_open &= "memory.zero_stage" not in self.fixed
        can_split = self._replicas(mesh) * mesh.context > 1 and is_open
        stages = (0, 1, 2, 3) if can_split else (config.memory.zero_stage,)
        for remat, zero_stage in itertools.product(remats, stages):
            yield ParallelPlan(
                mesh=mesh,
                tensor=config.tensor,
                num_microbatches=count,
                **pipeline,
                remat=remat,
                unroll=bool(config.train.unroll),
                zero_stage=zero_stage,
                placement=config.memory.placement,
            )


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _products(choices: list, product: int) -> Iterator[tuple[int, ...]]:
    """Yield one choice of each list, with this product."""
    if not choices:
        if product == 1:
            yield ()
        return
    for size in choices[0]:
        if product % size == 0:
            for remaining_sizes in _products(choices[1:], product // size):
                yield (size, *remaining_sizes)
