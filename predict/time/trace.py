"""Writes a predicted step as a trace for Perfetto.

    write_trace(prediction, "step.json")            # open in https://ui.perfetto.dev

The trace has a lane for kernels and one for each kind of communication. The simulated step is a
tree: a loop stores one iteration and a count, and the iteration may contain further loops. This
tree is far smaller than the list of all events in a step. To bound its size, the trace writes out
the first iterations of a loop and summarizes the others as one event per lane.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from predict.time.execution import Event, Execution, Repeat
from predict.time.lanes import lane_of, lanes_of
from predict.time.prediction import Prediction
from untrusted.files import write_text

#: Number of iterations of a loop that the trace writes out before it summarizes the others.
_SPELLED_OUT = 4
#: Maximum number of events in a trace: about 20 MB.
_MOST_EVENTS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Summary(Event):
    """The event that stands for the iterations of a loop that are not written out."""

    iterations: int


def write_trace(prediction: Prediction, path: str | Path) -> None:
    """Write the step as Chrome trace events, which Perfetto and chrome://tracing can open."""
    write_text(Path(path), json.dumps(trace(prediction), separators=(",", ":")))


def trace(prediction: Prediction) -> dict[str, Any]:
    """Return the step as Chrome trace events: one thread per lane, times in microseconds.

    The first iterations of each loop are written out, fewer of them for a program with many
    instructions. The other iterations become one event per lane, whose `args` hold the number of
    iterations that it stands for.
    """
    for spelled_out in (_SPELLED_OUT, 2, 1, 0):
        placed = list(_write_out(prediction.run, 0.0, spelled_out, _MOST_EVENTS))
        if len(placed) <= _MOST_EVENTS:
            break
    placed = placed[:_MOST_EVENTS]
    lanes = {lane: number for number, lane in enumerate(lanes_of(prediction.run))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "predicted step"}}
    ]
    for lane, number in lanes.items():
        name = {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}}
        events += [name, {**name, "name": "thread_sort_index", "args": {"sort_index": number}}]
    for item in placed:
        event = {
            "ph": "X",
            "pid": 0,
            "tid": lanes[lane_of(item.lane)],
            "name": item.name,
            "cat": item.category,
            "ts": round(1e6 * item.start_s, 3),
            "dur": round(1e6 * item.duration_s, 3),
        }
        if isinstance(item, _Summary) and item.iterations > 1:
            event["args"] = {"iterations": item.iterations}
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _write_out(
    run: Execution, start_s: float, spelled_out: int, max_events: int
) -> Iterator[Event]:
    """Yield the events of an execution, writing out `spelled_out` iterations of each loop.

    They start relative to the start of the step. Stops soon after `max_events` events.
    """
    num = 0
    for item in run.items:
        for placed in _spelled_item(item, start_s + item.start_s, spelled_out, max_events - num):
            num += 1
            yield placed
        if num > max_events:
            return


def _spelled_item(
    item: Event | Repeat, start_s: float, spelled_out: int, max_events: int
) -> Iterator[Event]:
    if isinstance(item, Event):
        yield dataclasses.replace(item, start_s=start_s)
        return
    count = item.count if not item.label else min(item.count, spelled_out)
    for _ in range(count):
        yield from _write_out(item.run, start_s, spelled_out, max_events)
        start_s += item.run.duration_s
    if item.count > count:
        yield from _summed_up(item, start_s, item.count - count)


def _summed_up(item: Repeat, start_s: float, count: int) -> Iterator[Event]:
    """Yield one event per lane for iterations that are not written out."""
    for lane in lanes_of(item.run):
        yield _Summary(
            lane=lane,
            category="loop",
            name=f"{item.label or 'loop'} × {count}",
            start_s=start_s,
            duration_s=count * item.run.duration_s,
            iterations=count,
        )
