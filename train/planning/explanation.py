"""Reports plans as a table or JSON, and says in one sentence why each loses to the best.

The sentences come from the predicted steps of both plans.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from predict.program.collective_table import align
from predict.time.prediction import CollectiveTime, Prediction, format_ms
from predict.time.transfer import crosses_hosts
from train.planning.finalists import Choice
from train.planning.memory.budget import size
from train.planning.plan_limits import NotCompiled

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
        choices: plans, the fastest first.
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
                format_ms(prediction.step_s),
                "-" if step.mfu is None else f"{step.mfu:.1%}",
                _memory(choice, gpus_per_host),
                f"{prediction.bubble_s / prediction.step_s:.1%}",
                f"{prediction.exposed_communication_s / prediction.step_s:.1%}",
                f"+{slower:.1%}" if slower else "best",
            )
        )
    lines = align(cells, left=(0,))
    best = choices[0]
    reasons = [f"{each.plan}: {_reason(each, best, gpus_per_host)}" for each in choices[1:]]
    if reasons:
        reasons = ["", "Why the others are slower:", *reasons]
    return "\n".join([*lines, *reasons])


def not_compiled_as_text(
    runners_up: Sequence[NotCompiled],
    first_tried: Sequence[NotCompiled],
    choices: Sequence[Choice],
    budget_bytes: float,
) -> str:
    """Say why other plans are slower, and why meshes that one would try first are not among them.

    Args:
        runners_up: plans that complete the table.
        first_tried: these meshes.
        choices: plans that were compiled, the fastest first.
        budget_bytes: memory that a step may use on a device.
    """
    known = {choice.plan.mesh for choice in choices} | {each.mesh for each in runners_up}
    slower = [_line(each, choices[0], math.inf) for each in runners_up]
    others = [
        _line(each, choices[0], budget_bytes) for each in first_tried if each.mesh not in known
    ]
    heading = "Slower, by their composed times (not compiled):"
    blocks = ["\n".join([heading, *slower])] * (len(slower) > 0)
    heading = "Meshes to try first, which are not among these (composed, not compiled):"
    blocks += ["\n".join([heading, *others])] * (len(others) > 0)
    return "\n\n".join(blocks)


def _line(plan: NotCompiled, best: Choice, budget_bytes: float) -> str:
    return f"{plan.plan or plan.mesh}: {_why_not(plan, best, budget_bytes)}"


def not_compiled_as_json(
    found: Sequence[NotCompiled], choices: Sequence[Choice], budget_bytes: float
) -> list[dict[str, Any]]:
    """Return plans for `json.dumps`; docs/plan.md lists the keys.

    Args:
        found: plans.
        choices: plans that were compiled, the fastest first.
        budget_bytes: memory that a step may use on a device; composed memory beyond it is a reason.
    """
    return [
        {
            "mesh": each.mesh.sizes,
            "settings": None if each.plan is None else each.plan.settings(),
            "composed_step_time_s": None if each.cost is None else each.cost.step_s,
            "composed_memory_bytes": None if each.cost is None else int(each.cost.memory_bytes),
            "reason": _why_not(each, choices[0], budget_bytes),
        }
        for each in found
    ]


def first_tried_as_json(
    found: Sequence[NotCompiled],
    choices: Sequence[Choice],
    budget_bytes: float,
    gpus_per_host: int,
) -> list[dict[str, Any]]:
    """Return the meshes that one would try first for `json.dumps`, some of which were compiled.

    Args:
        found: these meshes.
        choices: plans that were compiled, the fastest first.
        budget_bytes: memory that a step may use on a device.
        gpus_per_host: number of devices per host.
    """
    meshes = not_compiled_as_json(found, choices, budget_bytes)
    for mesh, each in zip(meshes, found, strict=True):
        compiled = next((c for c in choices if c.plan.mesh == each.mesh), None)
        if compiled is not None:
            reason = _reason(compiled, choices[0], gpus_per_host)
            mesh |= {
                "settings": compiled.plan.settings(),
                "composed_step_time_s": compiled.cost.step_s,
                "composed_memory_bytes": int(compiled.cost.memory_bytes),
                "reason": reason or "it is the mesh of the best plan",
            }
    return meshes


def _why_not(tried: NotCompiled, best: Choice, budget_bytes: float) -> str:
    """Return why a plan is worse than the best one, by their composed costs."""
    if tried.plan is None or tried.cost is None:
        return "it does not divide the model or the batch, or contradicts what is fixed"
    if tried.cost.memory_bytes > budget_bytes:
        return (
            f"its leanest plan takes {size(tried.cost.memory_bytes)} a device, of "
            f"{size(budget_bytes)}"
        )
    names = {
        "layers_s": "layers",
        "exposed_s": "exposed communication between replicas",
        "update_s": "update",
    }
    best_s = best.step.prediction.step_s
    of_best = best.cost.scaled(best_s / best.cost.step_s)
    more_s = tried.cost.step_s - best_s
    if more_s <= 0:
        return (
            "its composed time is not longer; it was not compiled because its estimated memory "
            "does not fit, or because plans that are as fast were compiled"
        )
    part, part_s = _largest_increase(names, of_best, tried.cost)
    return f"+{more_s / best_s:.1%}; {names[part]} {_ms(part_s)} more, of {_ms(more_s)}"


def _largest_increase(parts: Iterable[str], best: Any, other: Any) -> tuple[str, float]:
    """Return the part of which a step has more seconds than the best one, and how many more."""
    increases = {part: getattr(other, part) - getattr(best, part) for part in parts}
    return max(increases.items(), key=lambda each: each[1])


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
    """Return why a plan is slower than the best one, or that it is not; "" for the best."""
    step = choice.step
    shape = step.run.mesh.shape
    reason = why_slower(best.step.prediction, step.prediction, shape, gpus_per_host)
    return reason or "it is as fast as the best" * (choice is not best)


def why_slower(
    best: Prediction, other: Prediction, mesh_shape: Mapping[str, int], gpus_per_host: int
) -> str:
    """Return the part of a step that costs a plan the most time compared with the best one.

    Args:
        best: best plan's step.
        other: step of the plan to explain.
        mesh_shape: sizes of the other plan's mesh axes, in mesh order.
        gpus_per_host: number of GPUs per host.

    Returns:
        A sentence without a period, such as "pipeline bubble +120 ms, of +150 ms"; "" if the plan
        is not slower.
    """
    more_s = other.step_s - best.step_s
    if more_s <= 0:
        return ""
    part, part_s = _largest_increase(_PARTS, best, other)
    reason = f"{_PARTS[part]} +{_ms(part_s)}, of +{_ms(more_s)}"
    if part != "exposed_communication_s" or not other.collectives:
        return reason
    known = {(each.kind, each.axes, each.loop): each.exposed_s for each in best.collectives}

    def increase(each: CollectiveTime) -> float:
        return each.exposed_s - known.get((each.kind, each.axes, each.loop), 0.0)

    collective = max(other.collectives, key=increase)
    return f"{reason}; {_describe(collective, mesh_shape, gpus_per_host)}"


def _describe(collective: CollectiveTime, mesh_shape: Mapping[str, int], gpus_per_host: int) -> str:
    where = " and ".join(collective.axes) or "all axes"
    each = size(collective.bytes // max(1, collective.count))
    crosses = crosses_hosts(mesh_shape, collective.axes, gpus_per_host)
    hosts = " across hosts" if crosses else ""
    return (
        f"{collective.kind} over {where}{hosts}, {collective.count:,} × {each}, is exposed for "
        f"{_ms(collective.exposed_s)}"
    )


def _memory(choice: Choice, gpus_per_host: int) -> str:
    """Return the memory of a device, and of a host if it holds a part of the state."""
    device = size(choice.step.memory.in_all or 0)
    on_host = gpus_per_host * (choice.step.memory.host_bytes or 0)
    return f"{device}, {size(on_host)} a host" if on_host else device


def _ms(seconds: float) -> str:
    return f"{format_ms(seconds)} ms"
