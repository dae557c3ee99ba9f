"""Reports plans as a table or JSON, and says in one sentence why each loses to the best.

The sentences come from the predicted steps of both plans.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sharding.analysis.cost.prediction import CollectiveTime, Prediction
from sharding.analysis.cost.transfer import group_over
from train.planning.memory_budget import size
from train.planning.plan_search import Choice

#: Parts of a step -> their names in a sentence.
_PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "other_s": "other kernels",
    "exposed_communication_s": "exposed communication",
    "exposed_host_s": "exposed copies to and from the host",
    "bubble_s": "pipeline bubble",
}


def plans_as_text(choices: Sequence[Choice], gpus_per_host: int) -> str:
    """Format plans as a table, and say why the others are slower than the best one.

    Args:
        choices: the plans, the fastest first.
        gpus_per_host: number of devices per host.
    """
    cells = [("plan", "step, ms", "MFU", "memory", "bubble", "exposed", "")]
    fastest = choices[0].step.prediction.step_s
    for choice in choices:
        step = choice.step
        prediction = step.prediction
        slower = prediction.step_s / fastest - 1
        cells.append(
            (
                str(choice.plan),
                f"{1e3 * prediction.step_s:,.0f}",
                "-" if step.mfu is None else f"{step.mfu:.1%}",
                size(step.memory.in_all or 0),
                f"{prediction.bubble_s / prediction.step_s:.1%}",
                f"{prediction.exposed_communication_s / prediction.step_s:.1%}",
                f"+{slower:.1%}" if slower else "best",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    best = choices[0]
    reasons = [f"{each.plan}: {_reason(each, best, gpus_per_host)}" for each in choices[1:]]
    if reasons:
        reasons = ["", "Why the others are slower:", *reasons]
    return "\n".join([*lines, *reasons])


def plans_as_json(choices: Sequence[Choice], gpus_per_host: int) -> list[dict[str, Any]]:
    """Return plans for `json.dumps`; docs/plan.md lists the keys. Arguments as `plans_as_text`."""
    plans = []
    for choice in choices:
        report = choice.step.to_json()
        plans.append(
            {
                "settings": choice.plan.settings(),
                "composed_step_time_s": choice.cost.step_s,
                "reason": _reason(choice, choices[0], gpus_per_host),
                "predicted": report["predicted"],
                "memory": report["memory"],
            }
        )
    return plans


def _reason(choice: Choice, best: Choice, gpus_per_host: int) -> str:
    """Return why a plan is slower than the best one; "" for the best."""
    step = choice.step
    shape = step.run.mesh.shape
    return why_slower(best.step.prediction, step.prediction, shape, gpus_per_host)


def why_slower(
    best: Prediction, other: Prediction, mesh_shape: Mapping[str, int], gpus_per_host: int
) -> str:
    """Return what costs a plan the most time compared with the best one.

    Args:
        best: the best plan's step.
        other: the step of the plan to explain.
        mesh_shape: sizes of the other plan's mesh axes, in mesh order.
        gpus_per_host: number of GPUs per host.

    Returns:
        A sentence without a period, such as "pipeline bubble +120 ms, of +150 ms"; "" if the plan
        is not slower.
    """
    more_s = other.step_s - best.step_s
    if more_s <= 0:
        return ""
    increases = {part: getattr(other, part) - getattr(best, part) for part in _PARTS}
    part = max(increases, key=lambda part: increases[part])
    found = f"{_PARTS[part]} +{1e3 * increases[part]:,.0f} ms, of +{1e3 * more_s:,.0f} ms"
    if part != "exposed_communication_s" or not other.collectives:
        return found
    known = {(each.kind, each.axes, each.loop): each.exposed_s for each in best.collectives}

    def increase(each: CollectiveTime) -> float:
        return each.exposed_s - known.get((each.kind, each.axes, each.loop), 0.0)

    collective = max(other.collectives, key=increase)
    return f"{found}; {_described(collective, mesh_shape, gpus_per_host)}"


def _described(
    collective: CollectiveTime, mesh_shape: Mapping[str, int], gpus_per_host: int
) -> str:
    where = " and ".join(collective.axes) or "all axes"
    each = size(collective.bytes // max(1, collective.count))
    group = group_over(mesh_shape, collective.axes)
    hosts = " across hosts" if len({device // gpus_per_host for device in group}) > 1 else ""
    return (
        f"{collective.kind} over {where}{hosts}, {collective.count:,} × {each}, is exposed for "
        f"{1e3 * collective.exposed_s:,.0f} ms"
    )
