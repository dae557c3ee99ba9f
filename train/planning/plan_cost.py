"""Estimates the time and the memory of a plan from the times and the memory of its layers.

    layers of one microbatch (scaled_times.py) ─┐
    schedule's ticks (pipeline_cost.py) ────────┼─> time of the pipeline ─┐
    collectives between replicas ───────────────┴─> exposed communication ┼─> step
    parameters per device ────────────────────────> update ───────────────┘

These composed costs only decide which plans are compiled.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pipeline.config import BALANCED
from predict.machines.machine import Machine
from predict.time.transfer import group_over, transfer_s
from sharding.mesh import REPLICA_AXES
from train.config.schema import RunConfig
from train.planning.layer_times import ReplicaStep
from train.planning.parallel_plan import ParallelPlan
from train.planning.pipeline_cost import in_flight, pipeline_s
from train.planning.scaled_times import LayerTimes, ScaledTimes
from train.planning.state_bytes import GRADIENT, MOMENTS, STATE, WEIGHT

#: Share of the collectives that layers wait for even if the layers take longer, for example in the
#: first layer: 0.14 in LLaMA-3-8B with ZeRO 3 on 8 H100s, as compiled and predicted.
_EXPOSED_SHARE = 0.15
#: XLA combines a layer's gathers up to this size, its default. A layer waits for the first of them.
_COMBINED_BYTES = 30 * 2**20
#: Between the input gradient and the weight gradient of a chunk, the outputs' gradients and a part
#: of the activations are kept: as many bytes as this share of all activations, and this share of
#: those that were recomputed. Measured: 0.9 to 1.3 for GPT-2, LLaMA and T5, with 0.9.
_FOR_WEIGHTS = 1.1
_RECOMPUTED = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Composed cost of a plan on one device.

    Attributes:
        layers_s: time of all layers, embedding and head, with the pipeline's bubble.
        exposed_s: time for which they wait for collectives between replicas.
        update_s: time of the optimizer's update, with copies to and from host memory, and of the
            allocation of the step's memory.
        memory_bytes: estimated peak of the step.
        unknown: parts to compile before the time is known.
    """

    layers_s: float
    exposed_s: float
    update_s: float
    memory_bytes: float
    unknown: tuple[ReplicaStep, ...]

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.layers_s + self.exposed_s + self.update_s

    def scaled(self, factor: float) -> "PlanCost":
        """Return the cost with its times multiplied by a factor."""
        return dataclasses.replace(
            self,
            layers_s=factor * self.layers_s,
            exposed_s=factor * self.exposed_s,
            update_s=factor * self.update_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceParams:
    """Parameters that a plan divides alike, on a device of its largest stage.

    Attributes:
        count: number of parameters that the device computes with.
        num_trained: how many of them are trained.
        num_outer: number of parameters outside the stacks that it has in addition, because each
            stage has all of them.
        zero_stage: ZeRO stage that divides their state among replicas.
        axes: mesh axes of the replicas.
        num_replicas: number of replicas.
    """

    count: float
    num_trained: float
    num_outer: float
    zero_stage: int
    axes: tuple[str, ...]
    num_replicas: int

    @property
    def trained_fraction(self) -> float:
        """Fraction of the parameters that are trained."""
        return self.num_trained / self.count

    def shards(self, least_stage: int) -> int:
        """Return over how many replicas state is divided that this ZeRO stage and higher divide."""
        return self.num_replicas if self.zero_stage >= least_stage else 1


class Costed(NamedTuple):
    """A plan and its composed cost."""

    plan: ParallelPlan
    cost: PlanCost


class PlanCosts:
    """Costs of the plans of a config.

    Args:
        machine: rates of the devices.
        layers: times of the layers, whose base has been measured.
    """

    def __init__(self, config: RunConfig, machine: Machine, layers: ScaledTimes):
        self._config = config
        self._machine = machine
        self._layers = layers
        self._compute_bytes = jnp.dtype(config.precision.compute_dtype).itemsize
        self._known_shares: dict[Any, tuple[float, ...]] = {}

    def cost(self, plan: ParallelPlan) -> PlanCost:
        """Return the composed cost of a plan."""
        part = self.part(plan)
        times = self._layers.times(part)
        update_s = self._host_copies_s(plan)
        update_s += sum(
            self._layers.update_s(params.num_trained, params.num_replicas, params.zero_stage)
            for params in self._params(plan)
        )
        kept_bytes = self._kept_bytes(plan)
        allocated = kept_bytes + self._gradient_bytes(plan)
        update_s += self._machine.allocation_s_per_byte * allocated
        return PlanCost(
            layers_s=self._layers_s(plan, part, times),
            exposed_s=self._exposed_s(plan, times) + self._outer_gradients_s(plan),
            update_s=update_s,
            memory_bytes=self.state_bytes(plan) + kept_bytes,
            unknown=tuple(self._layers.unknown(part)),
        )

    def least_s(self, plan: ParallelPlan) -> float:
        """Return a lower bound of the time, without a bubble and collectives, in little time."""
        part = self.part(plan)
        times = self._layers.times(part)
        whole_s = times.forward_s + times.backward_s + self._layers.head_s(part)
        return plan.num_microbatches * whole_s / plan.mesh.pipeline

    def part(self, plan: ParallelPlan) -> ReplicaStep:
        """Return the part whose layers a plan consists of."""
        return ReplicaStep(
            context=plan.mesh.context,
            expert=plan.mesh.expert,
            model=plan.mesh.model,
            batch=plan.microbatch_size(self._config.data.global_batch_size),
            remat=plan.remat.layers,
        )

    def _params(self, plan: ParallelPlan) -> list[DeviceParams]:
        """Return the parameters of a device of the largest stage: of experts, and all others."""
        sizes = plan.mesh.axis_sizes(plan.tensor)
        stage = self._largest_stage(plan)
        # Every stage has the whole embedding and head, of which `count` has a share.
        outer = self._outer_params(plan) * (1 - stage)
        return [
            DeviceParams(
                count=counted.count * stage / counted.num_parts(sizes),
                num_trained=counted.num_trained * stage / counted.num_parts(sizes),
                num_outer=0.0 if counted.kept_axes else outer,
                zero_stage=plan.effective_zero_stage,
                axes=counted.replica_axes,
                num_replicas=math.prod(sizes[axis] for axis in counted.replica_axes),
            )
            for counted in self._layers.params
        ]

    def _shares(self, plan: ParallelPlan, *, of_time: bool = False) -> tuple[float, ...]:
        """Return the share of each chunk in the layers' FLOPs, or in their time, in layer order."""
        is_balanced = plan.layers_per_stage == BALANCED
        num_chunks = plan.mesh.pipeline * plan.chunks
        key = num_chunks, plan.layers_per_stage, plan.share_vocab, of_time
        if key not in self._known_shares:
            counts = plan.layers_per_stage
            if is_balanced or not counts:
                counts = self._layers.cut(
                    num_chunks, is_balanced=is_balanced, shares_vocab=plan.share_vocab
                )
            each = self._layers.layer_times if of_time else self._layers.work.layers
            bounds = itertools.pairwise(itertools.accumulate(map(int, counts), initial=0))
            shares = tuple(sum(each[first:stop]) / sum(each) for first, stop in bounds)
            self._known_shares[key] = shares
        return self._known_shares[key]

    def _largest_stage(self, plan: ParallelPlan) -> float:
        """Return the share of the layers' work in the stage that has most of it."""
        return max(self._shares(plan)) * plan.chunks

    def _layers_s(self, plan: ParallelPlan, part: ReplicaStep, times: LayerTimes) -> float:
        """Return the time of all microbatches on the slowest stage, with its bubble."""
        count = plan.num_microbatches
        head_s = self._layers.head_s(part)
        num_stages = plan.mesh.pipeline
        backward_s = times.backward_s
        if count > 1:  # the sums of gradients are read and written for every microbatch
            num_sums = sum(each.num_trained / each.shards(3) for each in self._params(plan))
            backward_s += num_stages * self._machine.memory_s(GRADIENT * num_sums)
        if num_stages == 1:
            return count * (times.forward_s + backward_s + head_s)
        backward_s += times.forward_s * plan.remat.recomputes_stages
        return pipeline_s(
            plan,
            self._shares(plan, of_time=True),
            forward_s=times.forward_s,
            backward_s=backward_s,
            head_s=head_s,
            head_input_bytes=self._layers.head_input_bytes(part),
            machine=self._machine,
        )

    def _exposed_s(self, plan: ParallelPlan, times: LayerTimes) -> float:
        """Return how long a stage waits for collectives between replicas."""
        gathered = [each for each in self._params(plan) if each.num_replicas > 1]
        if not gathered:
            return 0.0
        share = self._largest_stage(plan)
        forward_s = times.forward_s * share
        backward_s = times.backward_s * share
        zero_stage = plan.effective_zero_stage
        # Stage 3 has one collective for each layer.
        layers = share * len(self._layers.work.layers) if zero_stage == 3 else 1
        gather_s = scatter_s = num_bytes = 0.0
        for params in gathered:
            group = [group_over(plan.mesh.axis_sizes(plan.tensor), params.axes)]
            params_bytes = params.count + params.num_outer * (zero_stage >= 1)
            params_bytes *= self._compute_bytes / layers
            gradients = params.count + params.num_outer * (zero_stage >= 2)
            gradient_bytes = GRADIENT * params.trained_fraction * gradients / layers
            kind = "all-reduce"
            if zero_stage >= 2:
                kind = "reduce-scatter"
                gradient_bytes /= params.num_replicas
            gather_s += layers * transfer_s(self._machine, "all-gather", group, params_bytes)
            scatter_s += layers * transfer_s(self._machine, kind, group, gradient_bytes)
            num_bytes += params_bytes
        if zero_stage == 3:
            least = min(1.0, max(_EXPOSED_SHARE, _COMBINED_BYTES / num_bytes))
            exposed_s = self._waits_s(gather_s, forward_s, least)
            exposed_s += self._waits_s(gather_s + scatter_s, backward_s, least)
            return plan.num_microbatches * exposed_s
        # Such gradients are summed over microbatches first, and then over replicas.
        return scatter_s + (self._waits_s(gather_s, forward_s, 0.0) if zero_stage else 0.0)

    def _outer_params(self, plan: ParallelPlan) -> float:
        """Return how many parameters outside the stacks a device has that other stages have too."""
        if plan.mesh.pipeline == 1 or plan.share_vocab:
            return 0.0
        return self._layers.num_outer_params / plan.mesh.model

    def _outer_gradients_s(self, plan: ParallelPlan) -> float:
        """Return the time to sum the gradients of the embedding and the head over stages."""
        (outside,) = (counted for counted in self._layers.params if not counted.kept_axes)
        trained_fraction = outside.num_trained / outside.count
        num_bytes = GRADIENT * trained_fraction * self._outer_params(plan)
        if not num_bytes:
            return 0.0
        axes = ("pipeline", *REPLICA_AXES)
        if plan.effective_zero_stage >= 2:  # summed over replicas before, and divided among them
            num_bytes /= plan.num_replicas
            axes = ("pipeline",)
        group = [group_over(plan.mesh.axis_sizes(plan.tensor), axes)]
        return transfer_s(self._machine, "all-reduce", group, num_bytes)

    def _waits_s(self, collectives_s: float, layers_s: float, least: float) -> float:
        """Return how long layers wait for collectives that XLA runs at the same time, if it does.

        Args:
            collectives_s: time of the collectives.
            layers_s: time of the layers.
            least: share of the collectives that layers wait for at least.
        """
        if self._machine.shares_cores:
            return collectives_s  # programs for CPUs wait for each
        return collectives_s - (1 - least) * min(collectives_s, layers_s)

    def _host_copies_s(self, plan: ParallelPlan) -> float:
        """Return the time of copies to and from host memory, if state is placed there.

        A master weight is copied to the device twice in a step, moments once, and all of them back.
        """
        if plan.placement != "host":
            return 0.0
        memory = self._config.memory
        copied = (WEIGHT + 2 * STATE) * memory.offload_optimizer_fraction
        # Each microbatch reads these parameters twice, and adds to their gradients.
        of_microbatch = 2 * WEIGHT + 2 * GRADIENT
        copied += plan.num_microbatches * of_microbatch * memory.offload_parameters_fraction
        num_params = sum(each.num_trained / each.shards(1) for each in self._params(plan))
        return self._machine.host_copy_s(copied * num_params)

    def state_bytes(self, plan: ParallelPlan) -> float:
        """Return the bytes of parameters, optimizer and gradients in device memory."""
        return sum(
            self._frozen_bytes(params) + params.num_trained * self._trained_bytes(plan, params)
            for params in self._params(plan)
        )

    def _trained_bytes(self, plan: ParallelPlan, params: DeviceParams) -> float:
        """Return the bytes in device memory of each trained parameter and its optimizer state."""
        # Stages 1 and 2 divide master weights too. They count whole here, as a margin: without it,
        # plans of these stages that do not fit take the places of plans that do.
        weights = WEIGHT / params.shards(3) + MOMENTS / params.shards(1)
        gradients = GRADIENT / params.shards(2)
        copy = self._compute_bytes / params.shards(3)
        has_copy = params.zero_stage < 3 and self._compute_bytes < WEIGHT
        on_device = weights + gradients + (copy if has_copy else 0)
        if plan.placement != "host":
            return on_device
        optimizer = self._config.memory.offload_optimizer_fraction
        in_blocks = self._config.memory.offload_parameters_fraction
        # One layer of the stage at a time is on the device.
        layers = self._largest_stage(plan) * len(self._layers.work.layers)
        updated = (STATE + GRADIENT * in_blocks) / layers / params.shards(1)
        left_on_device = (1 - in_blocks) * (copy + gradients) + updated
        return (1 - optimizer) * on_device + optimizer * left_on_device

    def _frozen_bytes(self, params: DeviceParams) -> float:
        """Return the bytes of frozen parameters, and of their copies in the compute dtype."""
        precision = self._config.precision
        stored = jnp.dtype(precision.frozen or precision.params).itemsize
        copy = self._compute_bytes if stored > self._compute_bytes else 0
        is_split = params.zero_stage == 3
        size = stored / params.num_replicas if is_split else stored + copy
        return (params.count - params.num_trained) * size

    def _gradient_bytes(self, plan: ParallelPlan) -> float:
        return sum(GRADIENT * each.num_trained / each.shards(2) for each in self._params(plan))

    def memory_bytes(self, plan: ParallelPlan) -> float:
        """Return the memory of a plan."""
        return self.state_bytes(plan) + self._kept_bytes(plan)

    def _kept_bytes(self, plan: ParallelPlan) -> float:
        """Return the bytes of activations that wait for a backward, and of temporary values."""
        part = self.part(plan)
        part_memory = self._layers.memory(part)
        if plan.mesh.pipeline == 1:
            return part_memory.activations + part_memory.temporaries
        saved, waiting = in_flight(
            plan.mesh.pipeline, plan.num_microbatches, plan.schedule, plan.chunks
        )
        activations = part_memory.activations * (1 if plan.remat.recomputes_stages else saved)
        if waiting:
            whole = self._layers.memory(dataclasses.replace(part, remat="none")).activations
            recomputed = whole - part_memory.activations
            activations += waiting * (_FOR_WEIGHTS * whole + _RECOMPUTED * recomputed)
        return max(self._shares(plan)) * activations + part_memory.temporaries
