"""Estimates the time of a pipeline from its ticks, and counts the activations that it keeps.

All stages wait for the busiest one in each tick. Sends between stages run behind the layers, and
are waited for only if they take longer, as they do on a slow network.
"""

import collections
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from pipeline.runtime.tick_program import make_tick_program
from pipeline.schedule import make_schedule
from pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    max_in_flight,
)
from predict.machines.machine import Machine
from predict.time.ticks import Operations, Ticks
from predict.time.transfer import group_over, transfer_s
from train.planning.parallel_plan import ParallelPlan

#: Kernels and sends in a tick of a pipeline in addition to its layers: 45 to 90 us in an 8-layer
#: GPT-2 on 8 H100s, as compiled and predicted.
_TICK_KERNELS = 25
_TICK_SENDS = 2
#: How often stages that share the vocab exchange a microbatch's activations, or sums of them: once
#: for the embedding, twice for the head, and once for the embedding's gradient.
_EXCHANGES = 4
#: How much longer a backward takes in two parts, which XLA fuses apart: with zero_bubble and zbv,
#: stages of a GPT-2, a BERT and a LLaMA were busy 1.15 to 1.26 times as long as with 1f1b, as
#: compiled and predicted, and backwards are two thirds of that.
_SPLIT_BACKWARD = 1.3


def pipeline_s(
    plan: ParallelPlan,
    shares: Sequence[float],
    *,
    forward_s: float,
    backward_s: float,
    head_s: float,
    head_input_bytes: float,
    machine: Machine,
) -> float:
    """Return the time of all microbatches on the slowest stage, with its bubble.

    Args:
        plan: plan with several stages.
        shares: share of each chunk in the time of all layers, in layer order.
        forward_s: time of the forward of all layers for one microbatch.
        backward_s: time of their backward, including recomputation.
        head_s: time of embedding, head and loss for one microbatch.
        head_input_bytes: bytes of the head's input for one microbatch.
        machine: rates of the devices.
    """
    num_stages = plan.mesh.pipeline
    recomputes = plan.remat.recomputes_stages
    ticks = _ticks(num_stages, plan.num_microbatches, plan.schedule, plan.chunks, recomputes)
    tick_s = _TICK_KERNELS * machine.kernel_s + _TICK_SENDS * machine.collective_latency_s
    other_s = tick_s * ticks.counts.sum()
    if machine.shares_cores:  # a stage that waits leaves its cores to the others
        of_microbatch_s = forward_s + backward_s + head_s
        return plan.num_microbatches * of_microbatch_s / num_stages + other_s
    max_share = max(shares)
    last = shares[-1]
    times_s = (forward_s * max_share, backward_s * max_share, forward_s * last, backward_s * last)
    stages_s = ticks.work @ times_s
    group = [group_over(plan.mesh.axis_sizes(), ("pipeline",))]
    sends_s = _TICK_SENDS * transfer_s(machine, "collective-permute", group, head_input_bytes)
    if plan.share_vocab:
        exchange_s = transfer_s(machine, "all-reduce", group, head_input_bytes)
        other_s += plan.num_microbatches * _EXCHANGES * exchange_s
        head_share_s = head_s / num_stages * ticks.has_head.max(axis=1)
        busiest_s = stages_s.max(axis=1) + head_share_s
    else:
        busiest_s = (stages_s + head_s * ticks.has_head).max(axis=1)
    return ticks.counts @ np.maximum(busiest_s, sends_s) + other_s


@cache
def in_flight(
    num_stages: int, num_microbatches: int, name: str, num_chunks: int
) -> tuple[int, int]:
    """Return how many chunks' activations a stage keeps: for backwards, and for weight gradients.

    The latter wait for a weight gradient that is apart from the input gradient.

    Args:
        num_stages: number of pipeline stages.
        num_microbatches: number of microbatches.
        name: value of `pipeline.schedule`.
        num_chunks: value of `pipeline.chunks`.
    """
    # More microbatches than this wait for their turn, and keep nothing.
    max_microbatches = 2 * num_stages + num_microbatches % num_stages
    num_microbatches = min(num_microbatches, max_microbatches)
    schedule = _schedule(name, num_stages, num_microbatches, num_chunks)
    saved = max_in_flight(schedule, until=(BACKWARD, INPUT_GRADIENT))
    waiting = max_in_flight(schedule, since=INPUT_GRADIENT, until=(WEIGHT_GRADIENT,))
    return max(saved), max(waiting)


#: Making a schedule verifies it, which takes longer than pricing it.
_schedule = cache(make_schedule)


class _TickWork(NamedTuple):
    """The work of stages in ticks; ticks in which the stages have the same work count as one."""

    counts: np.ndarray  # number of such ticks, [ticks]
    # Forwards and backwards of chunks but the last, and of the last, of each stage. [ticks, stages,
    # 4]; stages with the same work count as one.
    work: np.ndarray
    has_head: np.ndarray  # whether the stage runs the head and its gradient, [ticks, stages]


@cache
def _ticks(
    num_stages: int, num_microbatches: int, name: str, num_chunks: int, recomputes: bool
) -> _TickWork:
    counts = _tick_counts(num_stages, num_microbatches, name, num_chunks, recomputes)
    splits = _schedule(name, 2, 2, num_chunks).splits_backward()
    width = max(map(len, counts))
    work = np.zeros((len(counts), width, 4))
    has_head = np.zeros((len(counts), width))
    for tick, stages in enumerate(counts):
        for stage, operations in enumerate(stages):
            for column, kind, amount in (
                (0, FORWARD, 1.0),
                (1, BACKWARD, _SPLIT_BACKWARD / 2 if splits else 1.0),
                (1, WEIGHT_GRADIENT, _SPLIT_BACKWARD / 2),
            ):
                of_last = 2 * (f"{kind}.is_last" in operations)
                work[tick, stage, column + of_last] += amount * (kind in operations)
            has_head[tick, stage] = f"{BACKWARD}.is_last" in operations
    return _TickWork(np.array([*counts.values()]), work, has_head)


@cache
def _tick_counts(
    num_stages: int, num_microbatches: int, name: str, num_chunks: int, recomputes: bool
) -> dict[frozenset[Operations], float]:
    """Return how many ticks have the same set of operations among their stages.

    If there are many microbatches, all but the first and the last repeat the same ticks, so their
    number is extrapolated from two shorter schedules.
    """
    few = 2 * num_stages + 1 + (num_microbatches - 1) % num_stages
    if num_microbatches > few + num_stages:
        counts = [
            _tick_counts(num_stages, count, name, num_chunks, recomputes)
            for count in (few, few + num_stages)
        ]
        times = (num_microbatches - few) / num_stages
        return {
            stages: counts[0].get(stages, 0.0) * (1 - times) + times * number
            for stages, number in counts[1].items()
        }
    schedule = _schedule(name, num_stages, num_microbatches, num_chunks)
    ticks = Ticks.of_program(make_tick_program(schedule, recomputes=recomputes))
    return dict(collections.Counter(frozenset(stages) for stages in ticks.stages))
