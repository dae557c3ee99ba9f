"""Predicts the step time of a pipeline schedule from the times of its parts.

benchmarks/pipeline.py explains the two predictions, *synchronous* and *work-bound*.
"""

import dataclasses
from collections.abc import Mapping

from benchmarks.harness.stage_parts import StagePart
from pipeline.schedules.table import BACKWARD, FORWARD, INPUT_GRADIENT, Op
from train.run.run import Run


def parts_of_op(run: Run, op: Op, stage: int) -> list[StagePart]:
    """Return the parts that one operation of a run's table computes.

    They mirror pipeline/runtime/executor.py. If stages are recomputed, a forward saves no
    residuals ("evaluate"), and its backward starts with a forward that does:

        remat "none"     F: forward      B: backward
        remat "stage"    F: evaluate     B: forward, backward

    Args:
        op: operation.
        stage: stage that runs it.

    Returns:
        (name, number of layers) of each part, in no particular order. The number is 0 for the
        embedding and the head.
    """
    (layout,) = run.layouts.values()
    virtual = run.schedule.virtual_stage(stage, op.chunk)
    is_first = virtual == 0
    is_last = virtual == len(run.schedule.placement) - 1
    num_layers = layout.chunks[stage][op.chunk][1]
    recomputes = run.config.train.parsed_remat.recomputes_stages
    if op.kind == FORWARD:
        if recomputes and is_last:
            return []  # The backward computes the head, and recomputes these layers anyway.
        names = ["evaluate" if recomputes else "forward"]
        end_parts = ["embed"] * is_first
    elif op.kind in (BACKWARD, INPUT_GRADIENT):
        names = ["forward"] * recomputes
        names += ["backward" if op.kind == BACKWARD else "input_gradient"]
        end_parts = ["head_gradient"] * is_last
        end_parts += (["embed"] * recomputes + ["embed_gradient"]) * is_first
    else:
        names = ["weight_gradient"]
        end_parts = []
    return [(name, num_layers) for name in names if num_layers] + [(name, 0) for name in end_parts]


def parts_of_step(run: Run) -> list[StagePart]:
    """Return the parts that all stages together compute in a step, with repetitions."""
    parts = [
        part
        for _, stage, cell in run.schedule.cells()
        for op in cell
        for part in parts_of_op(run, op, stage)
    ]
    return parts + [update_of(run)] * run.schedule.num_stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulePrediction:
    """Prediction of a step from its schedule table, without sends.

    Attributes:
        synchronous_s: step time in seconds if each tick lasts as long as its slowest stage.
        work_bound_s: step time in seconds if all stages share the hardware.
        work_s: step time in seconds if no stage were ever idle, with all stages working together.
        bubble: fraction of `synchronous_s` for which stages are idle, averaged over the stages.
    """

    synchronous_s: float
    work_bound_s: float
    work_s: float
    bubble: float


def predict(
    run: Run, alone: Mapping[StagePart, float], together: Mapping[StagePart, float]
) -> SchedulePrediction:
    """Predict the time of a run's step from the times of its parts.

    Args:
        alone: seconds of each part on one device while the others are idle.
        together: seconds of each part while all devices compute this part at the same time.

    Returns:
        The prediction.
    """
    num_stages = run.schedule.num_stages
    update = update_of(run)
    synchronous_s = alone[update]
    work_bound_s = max(alone[update], together[update])
    for row in run.schedule.ticks:
        cells = [
            [part for op in cell for part in parts_of_op(run, op, stage)]
            for stage, cell in enumerate(row)
        ]
        slowest_s = max(sum(alone[part] for part in cell) for cell in cells)
        # All stages together finish a part num_stages times in together[part] seconds, so each
        # part in this tick adds 1/num_stages of that time.
        all_s = sum(together[part] for cell in cells for part in cell) / num_stages
        synchronous_s += slowest_s
        work_bound_s += max(slowest_s, all_s)
    parts = parts_of_step(run)
    busy_s = sum(alone[part] for part in parts)
    return SchedulePrediction(
        synchronous_s=synchronous_s,
        work_bound_s=work_bound_s,
        work_s=sum(together[part] for part in parts) / num_stages,
        bubble=1 - busy_s / (num_stages * synchronous_s),
    )


def update_of(run: Run) -> StagePart:
    """Return the optimizer update of a stage's parameters, as a part."""
    (layout,) = run.layouts.values()
    return "update", len(layout.layer_of_slot) // run.schedule.num_stages
