"""The lanes of a drawn step: one for kernels, and one for each kind of communication."""

import collections

from predict.time.execution import BUBBLE, COMPUTE, HOST_LANES, Event, Execution


def lane_of(lane: str) -> str:
    """Return the lane that an event is drawn on; idle time is drawn among the kernels."""
    return COMPUTE if lane == BUBBLE else lane


def lanes_of(run: Execution) -> list[str]:
    """Return the lanes of an execution: kernels, sorted collectives, host copies."""
    lanes = {lane_of(lane) for lane, _ in seconds_by_lane(run)} - {COMPUTE}
    return [COMPUTE, *sorted(lanes, key=lambda lane: (lane in HOST_LANES, lane))]


def seconds_by_lane(run: Execution) -> dict[tuple[str, str], float]:
    """Return the seconds of each (lane, category) in an execution, repetitions included."""
    memo: dict[int, dict[tuple[str, str], float]] = {}

    def of(run: Execution) -> dict[tuple[str, str], float]:
        if id(run) not in memo:
            sums: dict[tuple[str, str], float] = collections.defaultdict(float)
            for item in run.items:
                if isinstance(item, Event):
                    sums[item.lane, item.category] += item.duration_s
                else:
                    for key, seconds in of(item.run).items():
                        sums[key] += item.count * seconds
            memo[id(run)] = dict(sums)
        return memo[id(run)]

    return of(run)
