"""Pipeline schedules as plain tables: made by a function, verified, measured, drawn.

A schedule is a table of ticks × stages; a cell holds the operations that a stage runs in that tick,
at most one of each kind, in order: F (forward) before B (backward). What a stage produces in a tick
reaches its neighbour at the end of it, so a neighbour can use it from the next tick on.

    python -m sharding.pipeline.schedule --schedule=1f1b --stages=4 --microbatches=8

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965), section 2.3; 1F1B, Narayanan et al. 2021
(arXiv:2104.04473), section 2.2.1.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Op(NamedTuple):
    """One operation of a stage: kind (FORWARD or BACKWARD) on one microbatch."""

    kind: str
    microbatch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches go through the stages."""

    schedule: str = "1f1b"

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} is unknown; "
                f"choose from {', '.join(SCHEDULES)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A table of operations: `ticks[t][s]` is the tuple of Ops of stage s in tick t."""

    name: str
    num_stages: int
    num_microbatches: int
    ticks: tuple[tuple[tuple[Op, ...], ...], ...]

    def when(self) -> dict[tuple[str, int, int], int]:
        """Returns (kind, microbatch, stage) -> tick."""
        return {
            (op.kind, op.microbatch, stage): tick
            for tick, row in enumerate(self.ticks)
            for stage, cell in enumerate(row)
            for op in cell
        }

    def has_backward(self) -> bool:
        return any(op.kind == BACKWARD for row in self.ticks for cell in row for op in cell)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: every microbatch's activations are held at the turn."""
    turn = num_microbatches + num_stages - 1
    return _from_ticks(
        "gpipe",
        num_stages,
        num_microbatches,
        forward=lambda stage, microbatch: microbatch + stage,
        backward=lambda stage, microbatch: turn + microbatch + (num_stages - 1 - stage),
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Every backward as early as it can be: activations in flight do not grow with microbatches."""
    return _from_ticks(
        "1f1b",
        num_stages,
        num_microbatches,
        forward=lambda stage, microbatch: microbatch + stage,
        backward=lambda stage, microbatch: microbatch + 2 * (num_stages - 1) - stage,
    )


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards alone, for evaluation."""
    return _from_ticks(
        "forward_only",
        num_stages,
        num_microbatches,
        forward=lambda stage, microbatch: microbatch + stage,
        backward=None,
    )


#: The training schedules that `pipeline.schedule` can name.
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def verify(schedule: Schedule) -> None:
    """Checks that every operation runs once and after all that it depends on.

    Raises:
      ValueError: names the operation and the dependency that is broken.
    """
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    seen: dict[tuple[str, int, int], int] = {}
    for tick, row in enumerate(schedule.ticks):
        if len(row) != schedule.num_stages:
            raise ValueError(f"tick {tick} has {len(row)} stages, not {schedule.num_stages}")
        for stage, cell in enumerate(row):
            for op in cell:
                key = (op.kind, op.microbatch, stage)
                if op.kind not in (FORWARD, BACKWARD) or op.microbatch not in microbatches:
                    raise ValueError(f"tick {tick}, stage {stage}: {_label(key)} is no operation")
                if key in seen:
                    raise ValueError(f"{_label(key)} runs twice: in ticks {seen[key]} and {tick}")
                seen[key] = tick
            if [op.kind for op in cell] not in ([], [FORWARD], [BACKWARD], [FORWARD, BACKWARD]):
                raise ValueError(
                    f"tick {tick}, stage {stage}: a cell holds at most one F, then one B"
                )
    kinds = (FORWARD, BACKWARD) if schedule.has_backward() else (FORWARD,)
    for kind in kinds:
        for stage in stages:
            for microbatch in microbatches:
                _check_dependencies((kind, microbatch, stage), seen, schedule.num_stages)


def bubble_fraction(schedule: Schedule, forward_time: float = 1.0, backward_time: float = 1.0):
    """Returns the share of stage-time that is idle when every stage runs freely.

    Each stage runs its operations in the table's order, each as soon as its inputs are there; sends
    cost nothing. Times are in any one unit.
    """
    cost = {FORWARD: forward_time, BACKWARD: backward_time}
    finish: dict[tuple[str, int, int], float] = {}
    stage_free = [0.0] * schedule.num_stages
    for row in schedule.ticks:
        for stage, cell in enumerate(row):
            for op in cell:
                needs = _needs((op.kind, op.microbatch, stage), schedule.num_stages)
                start = max([stage_free[stage], *(finish[key] for key in needs)])
                stage_free[stage] = start + cost[op.kind]
                finish[(op.kind, op.microbatch, stage)] = stage_free[stage]
    busy = sum(cost[kind] for kind, _, _ in finish)
    return 1.0 - busy / (schedule.num_stages * max(stage_free))


def synchronous_time(schedule: Schedule, forward_time: float = 1.0, backward_time: float = 1.0):
    """Returns the step's time when every tick lasts as long as its slowest stage.

    This is how the executor runs: sends at the end of a tick keep neighbours in step.
    """
    cost = {FORWARD: forward_time, BACKWARD: backward_time}
    return sum(max(sum(cost[op.kind] for op in cell) for cell in row) for row in schedule.ticks)


def max_in_flight(schedule: Schedule) -> list[int]:
    """Returns, per stage, the most microbatches begun (F) and not yet finished (B) at once."""
    most = [0] * schedule.num_stages
    now = [0] * schedule.num_stages
    for row in schedule.ticks:
        for stage, cell in enumerate(row):
            for op in cell:
                now[stage] += 1 if op.kind == FORWARD else -1
                most[stage] = max(most[stage], now[stage])
    return most


def draw(schedule: Schedule) -> str:
    """Returns the table as text: a line per stage, a column per tick."""
    cells = [
        ["".join(f"{op.kind}{op.microbatch}" for op in cell) or "." for cell in row]
        for row in schedule.ticks
    ]
    width = max(len(text) for row in cells for text in row)
    lines = ["tick    " + " ".join(f"{tick:<{width}}" for tick in range(len(cells)))]
    for stage in range(schedule.num_stages):
        lines.append(f"stage {stage:<2}" + " ".join(f"{row[stage]:<{width}}" for row in cells))
    return "\n".join(line.rstrip() for line in lines)


def _from_ticks(name, num_stages, num_microbatches, *, forward, backward) -> Schedule:
    """Returns the table in which F and B of (stage, microbatch) run in the ticks given."""
    at: dict[tuple[int, int], list[Op]] = {}
    for kind, tick_of in ((FORWARD, forward), (BACKWARD, backward)):
        for stage in range(num_stages):
            for microbatch in range(num_microbatches if tick_of else 0):
                cell = at.setdefault((tick_of(stage, microbatch), stage), [])
                cell.append(Op(kind, microbatch))
    num_ticks = 1 + max(tick for tick, _ in at)
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        ticks=tuple(
            tuple(tuple(at.get((tick, stage), ())) for stage in range(num_stages))
            for tick in range(num_ticks)
        ),
    )


def _needs(key: tuple[str, int, int], num_stages: int) -> list[tuple[str, int, int]]:
    """Returns the operations whose results (kind, microbatch, stage) uses."""
    kind, microbatch, stage = key
    if kind == FORWARD:
        return [(FORWARD, microbatch, stage - 1)] if stage else []
    own = [(FORWARD, microbatch, stage)]
    return own if stage == num_stages - 1 else [*own, (BACKWARD, microbatch, stage + 1)]


def _check_dependencies(key, seen: dict, num_stages: int) -> None:
    if key not in seen:
        raise ValueError(f"{_label(key)} never runs")
    for need in _needs(key, num_stages):
        same_stage = need[2] == key[2]
        if (
            need not in seen
            or seen[need] > seen[key]
            or (seen[need] == seen[key] and not same_stage)
        ):
            raise ValueError(
                f"{_label(key)} in tick {seen[key]} needs {_label(need)}, which "
                + (f"runs in tick {seen[need]}" if need in seen else "never runs")
            )


def _label(key: tuple[str, int, int]) -> str:
    kind, microbatch, stage = key
    return f"{kind}{microbatch} on stage {stage}"


def main(argv: list[str] | None = None) -> None:
    """Prints a schedule's table and its figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args(argv)
    if args.stages < 1 or args.microbatches < 1:
        parser.error("--stages and --microbatches must be at least 1")
    schedule = SCHEDULES[args.schedule](args.stages, args.microbatches)
    verify(schedule)
    print(draw(schedule))
    print(f"bubble fraction (free-running, F = B)     {bubble_fraction(schedule):.3f}")
    print(f"step time (tick-synchronous, F = 1, B = 2) {synchronous_time(schedule, 1, 2):g}")
    print(f"most microbatches in flight, per stage    {max_in_flight(schedule)}")


if __name__ == "__main__":
    main()
