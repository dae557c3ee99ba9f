"""How long a step takes by a table, under two clocks.

- *Free-running*: each stage runs its own operations in the table's order, each as soon as its
  inputs are there. Papers count bubbles so; ticks play no part.
- *Synchronous*: every tick lasts as long as its slowest stage, and sends end with the tick. This is
  how one program on all devices runs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from sharding.pipeline.schedules.table import (
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
class Times:
    """What the operations of a whole stage cost, in any one unit; a chunk takes 1/V of it."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    backward: float | None = None  # None = input_gradient + weight_gradient
    send: float = 0.0  # an activation or a cotangent, from one stage to another

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = "at least" if field.name == "send" else "above"
            if value is not None and not (
                math.isfinite(value) and (value > 0 or (value == 0 and field.name == "send"))
            ):
                raise ValueError(f"time {field.name}={value:g} must be a finite number {least} 0")

    def of(self, kind: str) -> float:
        """Returns what an operation of this kind costs a whole stage."""
        split = self.input_gradient + self.weight_gradient
        return {
            FORWARD: self.forward,
            BACKWARD: split if self.backward is None else self.backward,
            INPUT_GRADIENT: self.input_gradient,
            WEIGHT_GRADIENT: self.weight_gradient,
        }[kind]


class Span(NamedTuple):
    """An operation of a stage, from start to end."""

    stage: int
    op: Op
    start: float
    end: float


def free_running(schedule: Schedule, times: Times = Times()) -> float:  # noqa: B008
    """Returns the step's time when every stage runs as soon as it can."""
    return max(span.end for span in free_running_spans(schedule, times))


def synchronous_time(schedule: Schedule, times: Times = Times()) -> float:  # noqa: B008
    """Returns the step's time when every tick lasts as long as its slowest stage."""
    return sum(_tick_times(schedule, times))


#: The clocks that the command line can name.
CLOCKS: dict[str, Callable[[Schedule, Times], float]] = {
    "free": free_running,
    "synchronous": synchronous_time,
}


def bubble_fraction(
    schedule: Schedule,
    times: Times = Times(),  # noqa: B008
    *,
    clock: Callable[[Schedule, Times], float] = free_running,
) -> float:
    """Returns the share of the stages' time in which they compute nothing."""
    busy = sum(times.of(op.kind) for _, _, cell in schedule.cells() for op in cell)
    return 1.0 - busy / (schedule.num_chunks * schedule.num_stages * clock(schedule, times))


def free_running_spans(schedule: Schedule, times: Times) -> list[Span]:
    """Returns when each operation runs if every stage runs as soon as it can.

    A send adds to the time at which another stage has the input, not to the sender's.
    """
    held, ran, placement = schedule.chunks(), schedule.when(), schedule.placement
    finish: dict[Key, float] = {}
    stage_free = [0.0] * schedule.num_stages
    spans = []
    for _, stage, cell in schedule.cells():
        for op in cell:
            key = (op.kind, op.microbatch, held[stage][op.chunk])
            start = stage_free[stage]
            for need in needs(key, ran, len(placement)):
                crosses = placement[need[2]] != stage
                start = max(start, finish[need] + times.send * crosses)
            finish[key] = stage_free[stage] = start + times.of(op.kind) / schedule.num_chunks
            spans.append(Span(stage, op, start, finish[key]))
    return spans


def synchronous_spans(schedule: Schedule, times: Times) -> list[Span]:
    """Returns when each operation runs if every tick lasts as long as its slowest stage."""
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


def _tick_times(schedule: Schedule, times: Times) -> list[float]:
    """Returns what each tick lasts.

    A send starts when its operation ends and runs beside the rest of the cell: the forward's hides
    behind the cell's B, I or W, the input gradient's behind its W. What does not fit prolongs the
    tick. Two sends of a cell do not slow each other.
    """
    held, placement = schedule.chunks(), schedule.placement
    lasts = []
    for row in schedule.ticks:
        tick_time = 0.0
        for stage, cell in enumerate(row):
            end = 0.0
            for op in cell:
                end += times.of(op.kind) / schedule.num_chunks
                to = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: -1, WEIGHT_GRADIENT: 0}[op.kind]
                receiver = held[stage][op.chunk] + to
                inside = 0 <= receiver < len(placement)
                send = times.send if inside and placement[receiver] != stage else 0.0
                tick_time = max(tick_time, end + send)
        lasts.append(tick_time)
    return lasts
