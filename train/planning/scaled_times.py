"""Times of a model's layers for any microbatch and split, scaled from a few compiled parts.

Two or three parts are compiled first: the *base*, the same with the smallest batch of any plan if
that is smaller, and with twice the batch unless all plans have smaller ones. Between and beyond
these batches, times are linear. Two more things change a part's times, and each is measured by
compiling one part that differs from the base in nothing else:

    times(part) = times of the base for the part's batch
                  × factor of the split over context and model
                  + recomputation by train.remat

Within a host, factors of a split over `model` are interpolated between smaller and larger splits.
Until it has been measured, any other factor is assumed, and times that depend on it are not known.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import jax

from pipeline.config import BALANCED
from pipeline.stack_layout import even_cut
from sharding.mesh import MeshConfig
from train.config.schema import RunConfig
from train.planning.layer_times import CompiledReplica, ReplicaMemory, ReplicaStep
from train.planning.plan_devices import PlanDevices
from train.planning.state_bytes import UPDATE, UPDATE_OF_STATE
from train.run.model_traces import LayerCosts

#: Tokens of the base, and images of it.
_BASE_TOKENS = 8192
_BASE_IMAGES = 16
#: Assumed until it is measured: by how much each doubling of context × model lengthens the layers,
#: relative to a perfect division, and the part of the forward that a value of `train.remat`
#: recomputes.
_SPLIT_LOSS = 0.05
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


class ScaledTimes:
    """The times and the memory of the parts of one config on some devices.

    Args:
        devices: devices of the whole run.
        context: size of the mesh axis `context` in the base.
        model: size of the mesh axis `model` in the base.
        remat: value of `train.remat` in the base, without `stage`.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: PlanDevices,
        *,
        context: int,
        model: int,
        remat: str,
    ):
        self._config = config
        self._devices = devices
        data = config.data
        count = _BASE_IMAGES if data.reads_images else _BASE_TOKENS // data.sequence_length
        batch = 1 << max(0, count.bit_length() - 1)
        self.base = ReplicaStep(context=context, model=model, batch=batch, remat=remat)
        self._parts: dict[ReplicaStep, CompiledReplica] = {}
        self._cuts: dict[tuple[int, bool, bool], list[int]] = {}
        # Set by `measure_base`: batches, and the times of the base for them.
        self._batches: list[int] = []
        self._times: list[LayerTimes] = []
        self._head_s = 0.0
        self._update_s = 0.0
        self._stack_times: tuple[float, ...] = ()  # forwards of the base's stacks
        # Factors of (forward, backward), and shares of the forward that are recomputed.
        self._splits: dict[tuple[int, int], tuple[float, float]] = {(context, model): (1.0, 1.0)}
        self._recomputed: dict[str, float] = {remat: 0.0}

    def compiled(self, part: ReplicaStep) -> CompiledReplica:
        """Return a part that is traced and compiled on demand, and kept."""
        if part not in self._parts:
            self._parts[part] = CompiledReplica(part, self._config, self._devices)
        return self._parts[part]

    @cached_property
    def num_params(self) -> int:
        """Number of parameters of the model."""
        return self.compiled(self.base).run.num_params

    @cached_property
    def trained_fraction(self) -> float:
        """Fraction of the parameters that are trained."""
        return 1 - self.compiled(self.base).run.num_frozen / self.num_params

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
        trained = self.trained_fraction * self.num_params / self.base.model
        self._update_s = self._devices.machine.memory_s(UPDATE * trained)
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
            rest_s = times.forward_s + self.head_s(part) + self._update_s
            backward_s = max(0.0, times.step_s - rest_s)
            self._times.append(LayerTimes(forward_s=times.forward_s, backward_s=backward_s))

    def with_split(self, split: ReplicaStep | MeshConfig) -> ReplicaStep:
        """Return the base with the sizes of `context` and `model` of a part or a mesh."""
        return dataclasses.replace(self.base, context=split.context, model=split.model)

    def unknown(self, part: ReplicaStep) -> list[ReplicaStep]:
        """Return the parts to compile before the times of `part` are known."""
        base = self.base
        missing_parts = []
        if self._measured_split(part.context, part.model) is None:
            missing_parts.append(self.with_split(part))
        if part.remat not in self._recomputed:
            missing_parts.append(dataclasses.replace(base, remat=part.remat))
        return missing_parts

    def is_between(self, part: ReplicaStep, parts: Iterable[ReplicaStep]) -> bool:
        """Return whether a part can be interpolated once these larger splits are known."""
        return part.remat == self.base.remat and any(
            self._interpolates(part.context, part.model, (other.context, other.model))
            for other in parts
        )

    def measure(self, parts: Iterable[ReplicaStep]) -> None:
        """Read the factors of parts from `unknown`, after they have been compiled."""
        whole = self._of_base(self.base.batch)
        for part in parts:
            times = self.compiled(part).times
            rest_s = self.head_s(part) + self.update_s(part.model, 1, 0)
            backward_s = max(0.0, times.step_s - times.forward_s - rest_s)
            if part.remat != self.base.remat:
                more_s = backward_s - whole.backward_s
                self._recomputed[part.remat] = _ratio(more_s, whole.forward_s, 0.0)
            if (part.context, part.model) != (self.base.context, self.base.model):
                self._splits[part.context, part.model] = (
                    _ratio(times.forward_s, whole.forward_s, 1.0),
                    _ratio(backward_s, whole.backward_s, 1.0),
                )

    def times(self, part: ReplicaStep) -> LayerTimes:
        """Return the times of a part."""
        whole = self._of_base(part.batch)
        splits = self._measured_split(part.context, part.model)
        if splits is None:
            split = part.context * part.model / (self.base.context * self.base.model)
            assumed = (1 + _SPLIT_LOSS * max(0.0, math.log2(split))) / split
            splits = assumed, assumed
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

    def update_s(self, split: int, replicas: int, zero_stage: int) -> float:
        """Return the time of the update, of which ZeRO divides parts among the replicas.

        Args:
            split: number of devices that the parameters of a replica are split over.
            replicas: number of replicas.
        """
        share_of_state = UPDATE_OF_STATE / UPDATE
        state = share_of_state / (replicas if zero_stage else 1)
        others = (1 - share_of_state) / (replicas if zero_stage == 3 else 1)
        return self._update_s * self.base.model / split * (state + others)

    def memory(self, part: ReplicaStep) -> ReplicaMemory:
        """Return the memory of a part for all layers, without its state."""
        base_memory = self.compiled(dataclasses.replace(self.base, remat=part.remat)).memory
        work = self._work(part)
        return ReplicaMemory(
            activations=work * base_memory.activations, temporaries=work * base_memory.temporaries
        )

    def _measured_split(self, context: int, model: int) -> tuple[float, float] | None:
        """Return the factors of a split, measured or between measured ones; None if unknown."""
        if (context, model) in self._splits:
            return self._splits[context, model]
        below = [n for c, n in self._splits if c == context and n < model]
        above = [n for c, n in self._splits if self._interpolates(context, model, (c, n))]
        if not below or not above:
            return None
        low = max(below)
        high = min(above)
        # Products take 1 / model of the time, and each device waits for (model - 1) / model of the
        # bytes of a collective: both are linear in 1 / model.
        share = (1 / low - 1 / model) / (1 / low - 1 / high)
        one = self._splits[context, low]
        two = self._splits[context, high]
        return (one[0] + share * (two[0] - one[0]), one[1] + share * (two[1] - one[1]))

    def _interpolates(self, context: int, model: int, larger: tuple[int, int]) -> bool:
        """Return whether a split can be interpolated between the base and a larger split."""
        is_on_host = math.prod(larger) <= self._devices.machine.gpus_per_host
        return larger[0] == context == self.base.context and larger[1] > model and is_on_host

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
