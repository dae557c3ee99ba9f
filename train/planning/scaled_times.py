"""Times of a model's layers for any microbatch and split, scaled from a few compiled parts.

Two or three parts are compiled first: the *base*, the same with the smallest batch of any plan if
that is smaller, and with twice the batch unless all plans have smaller ones. Between and beyond
these batches, times are linear. Two more things change a part's times, and each is measured by
compiling one part that differs from the base in nothing else:

    times(part) = times of the base for the part's batch
                  × factor of the split over context, expert and model
                  + recomputation by train.remat

Within a host, factors of a split over `model` are interpolated between smaller and larger splits,
and the time that `expert` adds is measured with no other split. Until it has been measured, any
other factor is assumed, and times that depend on it are not known.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import jax

from pipeline.config import BALANCED
from pipeline.stack_layout import even_cut
from sharding.mesh import REPLICA_AXES, MeshConfig
from train.config.schema import RunConfig
from train.planning.layer_times import CompiledReplica, ReplicaMemory, ReplicaStep, Split
from train.planning.plan_devices import PlanDevices
from train.planning.state_bytes import UPDATE, UPDATE_OF_STATE
from train.run.model_traces import LayerCosts

#: Mesh axes whose devices have different parts of the parameters in every mode of the section
#: `tensor`. Devices of `row` gather them in each layer, which is in the times of the layers.
_PARTS = ("row", "hidden", "model")
#: Tokens of the base, and images of it.
_BASE_TOKENS = 8192
_BASE_IMAGES = 16
#: Assumed until it is measured: by how much each doubling of context × model lengthens layers,
#: relative to a perfect division, and the part of the forward that a value of `train.remat`
#: recomputes.
_SPLIT_LOSS = 0.05
#: The same for each doubling of `expert`, whose devices exchange tokens, on several hosts. On one
#: host nothing is assumed, so that these splits are measured first: they often take less time, as
#: each device reads the weights of fewer experts.
_DISTANT_EXPERT_LOSS = 0.25
_RECOMPUTED = {"none": 0.0, "full": 0.9}
_RECOMPUTED_BY_NAMES = 0.15
#: An even cut of the layers is tried alone if its busiest stage has at most this times the work of
#: the busiest stage of a balanced cut.
_MOST_IMBALANCE = 1.03
#: A balanced cut is tried if its busiest stage has at most this times the mean work of the stages.
_MOST_LOAD = 1.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of all layers for one microbatch on one device, including recomputation."""

    forward_s: float
    backward_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Number of parameters that a mesh divides alike.

    Attributes:
        count: number of parameters of the model.
        num_trained: how many of them are trained.
        kept_axes: mesh axes over which they stay divided in a step; see sharding/gather_modes.py.
    """

    count: int
    num_trained: int
    kept_axes: frozenset[str] = frozenset()

    def num_parts(self, mesh_sizes: Mapping[str, int]) -> int:
        """Return the number of devices that compute with different parts of a stage's."""
        return math.prod(mesh_sizes[axis] for axis in self.kept_axes | {*_PARTS})

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Return the mesh axes whose devices have the same parameters."""
        return tuple(axis for axis in REPLICA_AXES if axis not in (*_PARTS, *self.kept_axes))


class ScaledTimes:
    """The times and the memory of the parts of one config on some devices.

    Args:
        devices: devices of the whole run.
        split: sizes of the mesh axes in the base.
        remat: value of `train.remat` in the base, without `stage`.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: PlanDevices,
        *,
        split: Split,
        remat: str,
    ):
        self._config = config
        self._devices = devices
        data = config.data
        count = _BASE_IMAGES if data.reads_images else _BASE_TOKENS // data.sequence_length
        batch = 1 << max(0, count.bit_length() - 1)
        self.base = ReplicaStep(**split._asdict(), batch=batch, remat=remat)
        self._parts: dict[ReplicaStep, CompiledReplica] = {}
        self._cuts: dict[tuple[int, bool, bool], list[int]] = {}
        # Set by `measure_base`: batches, and the times of the base for them.
        self._batches: list[int] = []
        self._times: list[LayerTimes] = []
        self._head_s = 0.0
        self._stack_times: tuple[float, ...] = ()  # forwards of the base's stacks
        # Factors of (forward, backward), and shares of the forward that are recomputed.
        self._splits: dict[Split, tuple[float, float]] = {split: (1.0, 1.0)}
        self._recomputed: dict[str, float] = {remat: 0.0}

    def compiled(self, part: ReplicaStep) -> CompiledReplica:
        """Return a part that is traced and compiled on demand, and kept."""
        if part not in self._parts:
            self._parts[part] = CompiledReplica(part, self._config, self._devices)
        return self._parts[part]

    @cached_property
    def params(self) -> tuple[ParamCount, ...]:
        """Numbers of the model's parameters: of experts, and all others."""
        run = self.compiled(self.base).run
        layout = run.state_layout
        counts = collections.Counter[frozenset[str]]()
        trained = collections.Counter[frozenset[str]]()
        leaves = jax.tree.leaves(layout.portable.params)
        are_frozen = jax.tree.leaves(run.frozen) or [False] * len(leaves)
        kept_axes = jax.tree.leaves(layout.kept_axes)
        for leaf, axes, is_frozen in zip(leaves, kept_axes, are_frozen, strict=True):
            counts[axes] += leaf.size
            trained[axes] += leaf.size * (not is_frozen)
        return tuple(
            ParamCount(count=count, num_trained=trained[axes], kept_axes=axes)
            for axes, count in counts.items()
        )

    @cached_property
    def num_outer_params(self) -> int:
        """Number of parameters outside the stacks, such as the embedding; all stages have them."""
        run = self.compiled(self.base).run
        outer = run.functions.split(run.state_layout.portable.params)["non_stack"]
        return sum(leaf.size for leaf in jax.tree.leaves(outer))

    @cached_property
    def work(self) -> LayerCosts:
        """FLOPs of the layers, the embedding and the head."""
        return self.compiled(self.base).run.traces.work

    @cached_property
    def layer_times(self) -> Sequence[float]:
        """Relative times of the layers, in layer order.

        Layers of a stack are alike. If a stack has few tokens, its layers take longer than their
        FLOPs suggest.
        """
        counts = [*self.compiled(self.base).run.functions.num_layers.values()]
        if min(counts) == 1 or len(counts) != len(self._stack_times):
            return self.work.layers  # a stack of one layer has no loop whose time could be read
        stacks = zip(self._stack_times, counts, strict=True)
        return [seconds / count for seconds, count in stacks for _ in range(count)]

    def cut(self, num_chunks: int, *, is_balanced: bool, shares_vocab: bool) -> list[int]:
        """Return the number of layers of each of a pipeline's chunks, in layer order."""
        key = num_chunks, is_balanced, shares_vocab
        if key not in self._cuts:
            if is_balanced:
                layer_counts = self.work.balanced(num_chunks, shares_vocab=shares_vocab)
            else:
                layer_counts = even_cut(len(self.work.layers), num_chunks)
            self._cuts[key] = layer_counts
        return self._cuts[key]

    def busiest(self, num_chunks: int, *, is_balanced: bool, shares_vocab: bool) -> float:
        """Return the work of the busiest of a pipeline's chunks, relative to their mean."""
        counts = self.cut(num_chunks, is_balanced=is_balanced, shares_vocab=shares_vocab)
        chunk_flops = self.work.per_virtual_stage(counts, shares_vocab=shares_vocab)
        return max(chunk_flops) * num_chunks / sum(chunk_flops)

    def cuts_to_try(self, num_chunks: int, share_vocab: bool) -> list[tuple[str, ...]]:
        """Return values of `pipeline.layers_per_stage` that are worth trying.

        Args:
            num_chunks: number of chunks of the pipeline.
            share_vocab: value of `pipeline.share_vocab`.
        """
        even = self.busiest(num_chunks, is_balanced=False, shares_vocab=share_vocab)
        balanced = self.busiest(num_chunks, is_balanced=True, shares_vocab=share_vocab)
        divides = len(self.work.layers) % num_chunks == 0
        cuts: list[tuple[str, ...]] = [()] * divides
        helps = not divides or even > _MOST_IMBALANCE * balanced
        cuts += [BALANCED] * (helps and balanced <= _MOST_LOAD)
        return cuts

    def parts_of_base(self, smallest_batch: int, largest_batch: int) -> list[ReplicaStep]:
        """Return the base with the batches to compile first.

        Args:
            smallest_batch: examples of the smallest microbatch of any plan.
            largest_batch: examples of the largest one.
        """
        batch = self.base.batch
        batches = [smallest_batch] * (smallest_batch < batch) + [batch]
        batches += [2 * batch] * (len(batches) == 1 or largest_batch > batch)
        return [dataclasses.replace(self.base, batch=batch) for batch in batches]

    def measure_base(self, parts: Sequence[ReplicaStep]) -> None:
        """Read the times of `parts_of_base`, after they have been compiled."""
        part_times = [self.compiled(part).times for part in parts]
        added = (parts[-1].batch - parts[-2].batch) / self.base.batch
        growing_s = (part_times[-1].step_s - part_times[-2].step_s) / added
        work = self.work
        outside = work.embed + work.head
        self._head_s = growing_s * outside / (outside + sum(work.layers))
        self._stack_times = part_times[-1].forwards_s
        self._batches = [part.batch for part in parts]
        self._times = []
        for part, times in zip(parts, part_times, strict=True):
            rest_s = times.forward_s + self.head_s(part) + self._whole_update_s(part)
            backward_s = max(0.0, times.step_s - rest_s)
            self._times.append(LayerTimes(forward_s=times.forward_s, backward_s=backward_s))

    def with_split(self, split: Split | ReplicaStep | MeshConfig) -> ReplicaStep:
        """Return the base with the sizes of the axes of a split, a part or a mesh."""
        sizes = {axis: getattr(split, axis) for axis in Split._fields}
        return dataclasses.replace(self.base, **sizes)

    def unknown(self, part: ReplicaStep) -> list[ReplicaStep]:
        """Return the parts to compile before the times of `part` are known."""
        base = self.base
        missing_parts = []
        for split in self._needed_splits(part.split):
            if self._measured_split(split) is None:
                missing_parts.append(self.with_split(split))
        if part.remat not in self._recomputed:
            missing_parts.append(dataclasses.replace(base, remat=part.remat))
        return missing_parts

    def is_between(self, part: ReplicaStep, parts: Iterable[ReplicaStep]) -> bool:
        """Return whether a part can be interpolated once these larger splits are known."""
        return part.remat == self.base.remat and any(
            self._interpolates(part.split, other.split) for other in parts
        )

    def measure(self, parts: Iterable[ReplicaStep]) -> None:
        """Read the factors of parts from `unknown`, after they have been compiled."""
        whole = self._of_base(self.base.batch)
        for part in parts:
            times = self.compiled(part).times
            rest_s = self.head_s(part) + self._whole_update_s(part)
            backward_s = max(0.0, times.step_s - times.forward_s - rest_s)
            if part.remat != self.base.remat:
                more_s = backward_s - whole.backward_s
                self._recomputed[part.remat] = _ratio(more_s, whole.forward_s, 0.0)
            if part.split != self.base.split:
                self._splits[part.split] = (
                    _ratio(times.forward_s, whole.forward_s, 1.0),
                    _ratio(backward_s, whole.backward_s, 1.0),
                )

    def times(self, part: ReplicaStep) -> LayerTimes:
        """Return the times of a part."""
        whole = self._of_base(part.batch)
        splits = self._measured_split(part.split) or self._assumed_split(part.split)
        recomputed = self._recomputed.get(part.remat)
        if recomputed is None:
            recomputed = _recomputed_share(part.remat) - _recomputed_share(self.base.remat)
        backward_s = whole.backward_s + recomputed * whole.forward_s
        return LayerTimes(
            forward_s=splits[0] * whole.forward_s,
            backward_s=splits[1] * backward_s,
        )

    def head_s(self, part: ReplicaStep) -> float:
        """Return the time of embedding, head and loss for a microbatch."""
        return self._work(part) * self._head_s

    def head_input_bytes(self, part: ReplicaStep) -> float:
        """Return the bytes of the head's input for a microbatch."""
        base = self.compiled(self.base).run.traces.head_input_bytes
        return base * part.batch / self.base.batch

    def update_s(self, num_params: float, replicas: int, zero_stage: int) -> float:
        """Return the time of the update, of which ZeRO divides parts among the replicas.

        Args:
            num_params: number of trained parameters of a replica on one device.
            replicas: number of replicas.
        """
        state = UPDATE_OF_STATE / (replicas if zero_stage else 1)
        others = (UPDATE - UPDATE_OF_STATE) / (replicas if zero_stage == 3 else 1)
        return self._devices.machine.memory_s(num_params * (state + others))

    def _whole_update_s(self, part: ReplicaStep) -> float:
        """Return the time of the update in the step of a part."""
        sizes = part.split._asdict() | self._config.tensor.factors(part.model)
        trained = sum(count.num_trained / count.num_parts(sizes) for count in self.params)
        return self.update_s(trained, 1, 0)

    def memory(self, part: ReplicaStep) -> ReplicaMemory:
        """Return the memory of a part for all layers, without its state."""
        base_memory = self.compiled(dataclasses.replace(self.base, remat=part.remat)).memory
        temporaries = base_memory.temporaries
        if part.expert != self.base.expert:  # a layer has the gradients of fewer experts
            of_experts = dataclasses.replace(self.base, expert=part.expert)
            temporaries += self.compiled(of_experts).memory.temporaries
            temporaries -= self.compiled(self.base).memory.temporaries
        work = self._work(part)
        return ReplicaMemory(
            activations=work * base_memory.activations, temporaries=work * max(0.0, temporaries)
        )

    def _measured_split(self, split: Split) -> tuple[float, float] | None:
        """Return the factors of a split, measured or from measured ones; None if unknown."""
        if split in self._splits:
            return self._splits[split]
        needed = self._needed_splits(split)
        if len(needed) > 1:
            factors = [self._measured_split(each) for each in needed]
            known = [each for each in factors if each is not None]
            return self._sum(split, *known) if len(known) == len(needed) else None
        same = [n for *others, n in self._splits if (*others,) == split[:-1]]
        below = [n for n in same if n < split.model]
        above = [n for n in same if self._interpolates(split, split._replace(model=n))]
        if not below or not above:
            return None
        low = max(below)
        high = min(above)
        # Products take 1 / model of the time, and each device waits for (model - 1) / model of the
        # bytes of a collective: both are linear in 1 / model.
        share = (1 / low - 1 / split.model) / (1 / low - 1 / high)
        one = self._splits[split._replace(model=low)]
        two = self._splits[split._replace(model=high)]
        return (one[0] + share * (two[0] - one[0]), one[1] + share * (two[1] - one[1]))

    def _needed_splits(self, split: Split) -> list[Split]:
        """Return the splits to measure for one: itself, or two that differ less from the base."""
        base = self.base.split
        no_experts = split._replace(expert=base.expert)
        only_experts = base._replace(expert=split.expert)
        if split in (no_experts, only_experts) or not self._is_on_host(split):
            return [split]
        return [no_experts, only_experts]

    def _sum(
        self, split: Split, no_experts: tuple[float, float], only_experts: tuple[float, float]
    ) -> tuple[float, float]:
        """Return the factors of a split from the factors of its `_needed_splits`.

        Each device of `model` exchanges all of its tokens over `expert`, and of `context` its part.
        """
        share = self.base.context / split.context
        one, two = (a + share * (b - 1) for a, b in zip(no_experts, only_experts, strict=True))
        return one, two

    def _assumed_split(self, split: Split) -> tuple[float, float]:
        """Return the factors of a split that has not been measured."""
        base = self.base.split
        no_experts = self._measured_split(split._replace(expert=base.expert))
        if no_experts is None:
            parts = split.context * split.model / (base.context * base.model)
            assumed = (1 + _SPLIT_LOSS * max(0.0, math.log2(parts))) / parts
            no_experts = assumed, assumed
        only_experts = self._measured_split(base._replace(expert=split.expert))
        if only_experts is None or not self._is_on_host(split):
            loss = 0.0 if self._is_on_host(split) else _DISTANT_EXPERT_LOSS
            assumed = 1 + loss * max(0.0, math.log2(split.expert / base.expert))
            only_experts = assumed, assumed
        return self._sum(split, no_experts, only_experts)

    def _is_on_host(self, split: Split) -> bool:
        return math.prod(split) <= self._devices.machine.gpus_per_host

    def _interpolates(self, split: Split, larger: Split) -> bool:
        """Return whether a split is between a measured one and one that is split over more."""
        least = split._replace(model=self.base.model)
        is_larger = larger._replace(model=least.model) == least and larger.model > split.model
        return is_larger and self._is_on_host(larger) and least in self._splits

    def _of_base(self, batch: int) -> LayerTimes:
        """Return the times of the base with another batch, between its two nearest batches."""
        upper = min(len(self._batches) - 1, max(1, bisect.bisect_left(self._batches, batch)))
        one = self._times[upper - 1]
        two = self._times[upper]
        start = self._batches[upper - 1]
        share = (batch - start) / (self._batches[upper] - start)
        return LayerTimes(
            forward_s=max(0.0, one.forward_s + share * (two.forward_s - one.forward_s)),
            backward_s=max(0.0, one.backward_s + share * (two.backward_s - one.backward_s)),
        )

    def _work(self, part: ReplicaStep) -> float:
        """Return the work of one device in a part, relative to the base."""
        split = self.base.context * self.base.model / (part.context * part.model)
        return split * part.batch / self.base.batch


def _recomputed_share(remat: str) -> float:
    return _RECOMPUTED.get(remat, _RECOMPUTED_BY_NAMES)


def _ratio(part: float, whole: float, default: float) -> float:
    """Return part / whole; a stack of one layer has no loop whose time could be read."""
    return part / whole if whole > 0 else default
