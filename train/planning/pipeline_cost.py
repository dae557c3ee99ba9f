"""Composes the time of a pipeline from the times of its layers, tick by tick.

All stages wait for the busiest one in each tick. The bytes of sends between stages are not counted:
they run behind the layers.
"""

import collections
import itertools
from collections.abc import Sequence
from functools import cache

from sharding.analysis.cost.machine import Machine
from sharding.analysis.cost.ticks import Operations, Ticks
from sharding.pipeline.config import PipelineConfig
from sharding.pipeline.runtime.executor import plan_execution
from sharding.pipeline.schedule import make_schedule
from sharding.pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    max_in_flight,
)
from train.planning.parallel_plan import ParallelPlan

#: Kernels and sends in a tick of a pipeline, besides its layers: 45 to 90 us in an 8-layer GPT-2 on
#: 8 H100s, as compiled and predicted.
_TICK_KERNELS = 25
_TICK_SENDS = 2
#: Work that all stages do together with `pipeline.share_vocab`. For each, they exchange activations
#: of a microbatch, or sums of them.
_SHARED_WORK = ("embed", "head", "embed_gradient")


def pipeline_s(
    plan: ParallelPlan,
    shares: Sequence[float],
    *,
    forward_s: float,
    backward_s: float,
    head_s: float,
    machine: Machine,
) -> float:
    """Return the time of all microbatches on the slowest stage, with its bubble.

    Args:
        plan: a plan with several stages.
        shares: the share of the layers' work in each chunk, in layer order.
        forward_s: time of the forward of all layers for one microbatch.
        backward_s: time of their backward, with what it recomputes.
        head_s: time of embedding, head and loss for one microbatch.
        machine: the rates of the devices.
    """
    num_stages = plan.mesh.pipeline
    ticks = _tick_counts(
        num_stages,
        plan.num_microbatches,
        PipelineConfig(
            schedule=plan.schedule,
            chunks=plan.chunks,
            remat=plan.pipeline_remat,
            share_vocab=plan.share_vocab,
        ),
    )
    tick_s = _TICK_KERNELS * machine.kernel_s + _TICK_SENDS * machine.collective_latency_s
    if machine.shares_cores:  # a stage that waits leaves its cores to the others
        of_microbatch_s = forward_s + backward_s + head_s
        return plan.num_microbatches * of_microbatch_s / num_stages + tick_s * sum(ticks.values())
    splits = any(WEIGHT_GRADIENT in operations for stages in ticks for operations in stages)

    def work_s(operations: Operations) -> float:
        seconds = forward_s * (FORWARD in operations)
        seconds += backward_s * (1 - splits / 2) * (BACKWARD in operations)
        seconds += backward_s / 2 * (WEIGHT_GRADIENT in operations)
        is_last = any(name.endswith(".is_last") for name in operations)
        seconds *= shares[-1] if is_last else max(shares)
        if plan.share_vocab:
            exchanges = sum(name in operations for name in _SHARED_WORK)
            seconds += head_s / num_stages * ("head" in operations)
            return seconds + exchanges * machine.collective_latency_s
        return seconds + head_s * (f"{BACKWARD}.is_last" in operations)

    of_operations = {operations: work_s(operations) for operations in {*itertools.chain(*ticks)}}
    return sum(
        number * (tick_s + max(of_operations[operations] for operations in stages))
        for stages, number in ticks.items()
    )


@cache
def in_flight(num_stages: int, num_microbatches: int, name: str, num_chunks: int) -> int:
    """Return the largest number of chunks' activations that a stage keeps at a time.

    Args:
        num_stages: number of pipeline stages.
        num_microbatches: number of microbatches.
        name: value of `pipeline.schedule`.
        num_chunks: value of `pipeline.chunks`.
    """
    # More microbatches than this wait for their turn, and keep nothing.
    most = 4 * num_stages + num_microbatches % num_stages
    num_microbatches = min(num_microbatches, most)
    return max(max_in_flight(make_schedule(name, num_stages, num_microbatches, num_chunks)))


@cache
def _tick_counts(
    num_stages: int, num_microbatches: int, config: PipelineConfig
) -> dict[frozenset[Operations], float]:
    """Return how many ticks have the same set of operations among their stages.

    Of many microbatches, all but the first and the last repeat the same ticks, so their number is
    extrapolated from two shorter schedules.
    """
    few = 2 * num_stages + 1 + (num_microbatches - 1) % num_stages
    if num_microbatches > few + num_stages:
        counts = [_tick_counts(num_stages, count, config) for count in (few, few + num_stages)]
        times = (num_microbatches - few) / num_stages
        return {
            stages: counts[0].get(stages, 0.0) * (1 - times) + times * number
            for stages, number in counts[1].items()
        }
    schedule = make_schedule(config.schedule, num_stages, num_microbatches, config.chunks)
    ticks = Ticks.of_plan(plan_execution(schedule, config))
    return dict(collections.Counter(frozenset(stages) for stages in ticks.stages))
