"""Computes the time of a step from its schedule table, under two clocks.

- *Free-running*: each stage runs its operations in the order of the table, each as soon as its
  inputs have arrived. Ticks have no meaning. Papers measure bubbles this way.
- *Synchronous*: every tick lasts as long as its slowest stage, and sends end with the tick. This is
  how one program on all devices runs, and so how the executor runs; it hides more of the sends if
  backwards are whole.

For 1F1B with S = 2, M = 2, F = 1, B = 2:

    synchronous   tick 0   tick 1       tick 2       tick 3
    stage 0       F0 . .   F1 . .       B0 B0 .      B1 B1
    stage 1                F0 B0 B0     F1 B1 B1             step time 1 + 3 + 3 + 2 = 9

    (tick 0 lasts 1, tick 1 and 2 last 3, tick 3 lasts 2; a letter is one unit of time)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Key,
    Op,
    Schedule,
    needs,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Time of each operation for a whole stage, in any one unit; a chunk takes 1/V of it."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    backward: float | None = None  # None = input_gradient + weight_gradient
    send: float = 0.0  # transfer of an activation or a cotangent between two stages

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = "at least" if field.name == "send" else "above"
            if value is not None and not (
                math.isfinite(value) and (value > 0 or (value == 0 and field.name == "send"))
            ):
                raise ValueError(f"time {field.name}={value:g} must be a finite number {least} 0")

    def of(self, kind: str) -> float:
        """Return the time of an operation of this kind for a whole stage."""
        split = self.input_gradient + self.weight_gradient
        return {
            FORWARD: self.forward,
            BACKWARD: split if self.backward is None else self.backward,
            INPUT_GRADIENT: self.input_gradient,
            WEIGHT_GRADIENT: self.weight_gradient,
        }[kind]


class Span(NamedTuple):
    """An operation on a stage, with its start and end time."""

    stage: int
    op: Op
    start: float
    end: float


def free_running(schedule: Schedule, times: OperationTimes = OperationTimes()) -> float:  # noqa: B008
    """Return the step time if every stage runs each operation once its inputs have arrived."""
    return max(span.end for span in free_running_spans(schedule, times))


def synchronous_time(schedule: Schedule, times: OperationTimes = OperationTimes()) -> float:  # noqa: B008
    """Return the step time if every tick lasts as long as its slowest stage."""
    return sum(_tick_times(schedule, times))


#: Clocks by their names on the command line.
CLOCKS: dict[str, Callable[[Schedule, OperationTimes], float]] = {
    "free": free_running,
    "synchronous": synchronous_time,
}


def bubble_fraction(
    schedule: Schedule,
    times: OperationTimes = OperationTimes(),  # noqa: B008
    *,
    clock: Callable[[Schedule, OperationTimes], float] = free_running,
) -> float:
    """Return the fraction of the stages' time in which they are idle."""
    busy = sum(times.of(op.kind) for _, _, cell in schedule.cells() for op in cell)
    return 1.0 - busy / (schedule.num_chunks * schedule.num_stages * clock(schedule, times))


def free_running_spans(schedule: Schedule, times: OperationTimes) -> list[Span]:
    """Return the start and end of each operation if every stage runs as soon as it can.

    A send delays the receiver, not the sender.
    """
    chunks = schedule.chunks()
    ran = schedule.when()
    placement = schedule.placement
    finish: dict[Key, float] = {}
    stage_free = [0.0] * schedule.num_stages
    spans = []
    for _, stage, cell in schedule.cells():
        for op in cell:
            key = (op.kind, op.microbatch, chunks[stage][op.chunk])
            start = stage_free[stage]
            for need in needs(key, ran, len(placement)):
                crosses = placement[need[2]] != stage
                start = max(start, finish[need] + times.send * crosses)
            finish[key] = stage_free[stage] = start + times.of(op.kind) / schedule.num_chunks
            spans.append(Span(stage, op, start, finish[key]))
    return spans


def synchronous_spans(schedule: Schedule, times: OperationTimes) -> list[Span]:
    """Return the start and end of each operation if ticks last as long as their slowest stage."""
    spans = []
    tick_start = 0.0
    for row, tick_time in zip(schedule.ticks, _tick_times(schedule, times), strict=True):
        for stage, cell in enumerate(row):
            start = tick_start
            for op in cell:
                end = start + times.of(op.kind) / schedule.num_chunks
                spans.append(Span(stage, op, start, end))
                start = end
        tick_start += tick_time
    return spans


def _tick_times(schedule: Schedule, times: OperationTimes) -> list[float]:
    """Return the duration of each tick.

    A send starts when its operation ends and overlaps with the rest of the cell: the forward's send
    with the cell's B, I or W, the input gradient's send with its W. The part of a send that does
    not fit lengthens the tick. Two sends of a cell do not slow each other down.
    """
    chunks = schedule.chunks()
    placement = schedule.placement
    lasts = []
    for row in schedule.ticks:
        tick_time = 0.0
        for stage, cell in enumerate(row):
            end = 0.0
            for op in cell:
                end += times.of(op.kind) / schedule.num_chunks
                to = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: -1, WEIGHT_GRADIENT: 0}[op.kind]
                receiver = chunks[stage][op.chunk] + to
                inside = 0 <= receiver < len(placement)
                send = times.send if inside and placement[receiver] != stage else 0.0
                tick_time = max(tick_time, end + send)
        lasts.append(tick_time)
    return lasts
