"""A schedule's table as arrays that a program can look up, with a buffer slot for every send.

Pure Python and NumPy; sharding/pipeline/executor.py runs what is planned here.
"""

import dataclasses

import numpy as np

from sharding.pipeline.schedule import BACKWARD, FORWARD, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The table as arrays [ticks, stages]; -1 stands for nothing to do.

    A buffer slot holds what arrived from a neighbour until its last use. Slot `depth` is the one
    into which arrivals that nobody uses are written.
    """

    forward: np.ndarray  # microbatch whose forward runs
    backward: np.ndarray  # microbatch whose backward runs
    forward_slot: np.ndarray  # where the forward's input lies
    backward_slot: np.ndarray  # where the backward's input lies
    cotangent_slot: np.ndarray  # where the backward's cotangent lies
    arriving_slot: np.ndarray  # where the activation that arrives at the tick's end goes
    arriving_cotangent_slot: np.ndarray
    depth: int
    cotangent_depth: int
    num_microbatches: int


#: The fields of Plan that are tables.
TABLES = (
    "forward",
    "backward",
    "forward_slot",
    "backward_slot",
    "cotangent_slot",
    "arriving_slot",
    "arriving_cotangent_slot",
)


def make_plan(schedule: Schedule) -> Plan:
    """Returns the schedule as tables, with a buffer slot for everything that crosses stages."""
    when, last = schedule.when(), schedule.num_stages - 1
    shape = (len(schedule.ticks), schedule.num_stages)
    tables = {name: np.full(shape, -1) for name in TABLES}
    for (kind, microbatch, stage), tick in when.items():
        tables["forward" if kind == FORWARD else "backward"][tick, stage] = microbatch

    last_use = BACKWARD if schedule.has_backward() else FORWARD
    depths = []
    for kind, arriving, reader, step in (
        (FORWARD, "arriving_slot", "backward_slot", 1),
        (BACKWARD, "arriving_cotangent_slot", "cotangent_slot", -1),
    ):
        depth = 0
        for stage in range(schedule.num_stages):
            sender = stage - step
            if not 0 <= sender <= last or (kind == BACKWARD and last_use == FORWARD):
                continue
            lifetimes = [
                (when[kind, m, sender], when[last_use, m, stage], m)
                for m in range(schedule.num_microbatches)
            ]
            for (arrival, use, m), slot in _assign_slots(lifetimes).items():
                tables[arriving][arrival, stage] = slot
                tables[reader][use, stage] = slot
                if kind == FORWARD:
                    tables["forward_slot"][when[FORWARD, m, stage], stage] = slot
                depth = max(depth, slot + 1)
        depths.append(depth)
        unused = tables[arriving] < 0
        tables[arriving][unused] = depth
    # The last stage's forward is part of its backward: ticks with nothing else are no ticks.
    works = tables["backward"] >= 0
    works |= (tables["forward"] >= 0) & ((np.arange(last + 1) < last) | (last_use == FORWARD))
    tables = {name: table[works.any(axis=1)] for name, table in tables.items()}
    return Plan(
        **tables,
        depth=depths[0],
        cotangent_depth=depths[1],
        num_microbatches=schedule.num_microbatches,
    )


def _assign_slots(lifetimes: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], int]:
    """Returns a slot per (arrival, last use, id) such that no two share one while alive.

    What arrives at the end of a tick may take the slot of what was last used in that tick.
    """
    slots: dict[tuple[int, int, int], int] = {}
    free_from: list[int] = []
    for arrival, use, microbatch in sorted(lifetimes):
        slot = next((i for i, tick in enumerate(free_from) if tick <= arrival), len(free_from))
        free_from[slot : slot + 1] = [use]
        slots[arrival, use, microbatch] = slot
    return slots
