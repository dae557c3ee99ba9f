"""The sentence that says why a plan is slower than the best one."""

import dataclasses

import pytest

from predict.time.execution import Execution, Totals
from predict.time.prediction import CollectiveTime, Prediction
from train.planning.explanation import why_slower

MESH = {"pipeline": 2, "data": 4, "fsdp": 1, "context": 1, "expert": 1, "model": 8}
PARTS = ("matmul_s", "attention_s", "other_s", "exposed_communication_s", "bubble_s")


def prediction(*collectives: CollectiveTime, **seconds: float) -> Prediction:
    parts = {part: 1.0 for part in PARTS} | seconds
    run = Execution(duration_s=sum(parts.values()), busy=(), totals=Totals(), items=())
    return Prediction(
        step_s=sum(parts.values()),
        communication_s=3.0,
        host_s=0.0,
        exposed_host_s=0.0,
        collectives=collectives,
        run=run,
        **parts,
    )


def collective(kind: str, axes: tuple[str, ...], exposed_s: float) -> CollectiveTime:
    return CollectiveTime(
        kind=kind,
        axes=axes,
        loop="layers",
        count=96,
        bytes=96 * 2**26,
        seconds=exposed_s,
        exposed_s=exposed_s,
        is_async=True,
        is_overlapped=True,
    )


def test_best_plan_needs_no_reason():
    assert why_slower(prediction(), prediction(), MESH, 8) == ""


@pytest.mark.parametrize(
    ("part", "name"), [("bubble_s", "pipeline bubble"), ("other_s", "other kernels")]
)
def test_reason_names_the_part_that_takes_the_most_additional_time(part, name):
    other = prediction(**{part: 2.5, "matmul_s": 1.25})
    assert why_slower(prediction(), other, MESH, 8) == f"{name} +1,500 ms, of +1,750 ms"


@pytest.mark.parametrize(
    ("axes", "gpus_per_host", "where"),
    [
        (("model",), 8, "model"),
        (("model",), 4, "model across hosts"),
        (("data",), 32, "data"),
        (("data",), 8, "data across hosts"),
        (("pipeline", "model"), 32, "pipeline and model across hosts"),
    ],
)
def test_reason_names_the_collective_that_is_exposed_longer(axes, gpus_per_host, where):
    common = collective("all-gather", ("data",), 0.9)
    best = prediction(common)
    found = collective("all-reduce", axes, 0.6)
    other = prediction(found, common, exposed_communication_s=1.5)
    assert why_slower(best, other, MESH, gpus_per_host) == (
        "exposed communication +500 ms, of +500 ms; "
        f"all-reduce over {where}, 96 × 64.0 MiB, is exposed for 600 ms"
    )
    # The best plan exposes the all-gather just as long.
    worse = dataclasses.replace(common, exposed_s=1.4)
    assert "all-gather over data" in why_slower(
        best, prediction(worse, exposed_communication_s=1.5), MESH, gpus_per_host
    )
