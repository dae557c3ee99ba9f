"""Says in one sentence why a plan is slower than another, from both predicted steps."""

from collections.abc import Mapping

from sharding.analysis.cost.prediction import CollectiveTime, Prediction
from sharding.analysis.cost.transfer import group_over
from train.planning.memory_budget import size

#: Parts of a step -> their names in a sentence.
_PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "other_s": "other kernels",
    "exposed_communication_s": "exposed communication",
    "exposed_host_s": "exposed copies to and from the host",
    "bubble_s": "pipeline bubble",
}


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
