"""Predicts the time of a training step from its compiled program.

    prediction = predict(compiled.as_text(), mesh.shape, machine, Ticks.of_program(program))
    print(format_prediction(prediction))

The program must be scheduled, as the text of every compiled program is. Compile it for GPUs with
`sharding.compiler_options`, which makes XLA write its own cost estimates into the program. Programs
for CPUs have none; their machine has rates that were measured (see predict/machines/datasheets.py).

A prediction has three parts: kernel_time.py estimates the time of one instruction, simulation.py
runs the program with these times, and picture.py and trace.py draw the result.

Three effects are not modelled: kernels and communication slow each other down, since they share the
device's memory; between two steps, the host prepares a batch; and a GPU lowers its clock at its
power limit. Use predictions to compare plans, and to find the bottleneck of a step. Real steps tend
to take longer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from predict.machines.machine import Machine
from predict.program.collective_table import align
from predict.program.communication import Collective, collectives_of
from predict.program.parse import parse_modules
from predict.time.execution import BUBBLE, HOST_LANES, Execution
from predict.time.kernel_time import Costs
from predict.time.simulation import Simulator
from predict.time.ticks import Ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Total time of the collectives of one kind, set of mesh axes and loop.

    Attributes:
        kind: as in `communication.Collective`.
        axes: as in `communication.Collective`.
        loop: as in `communication.Collective`.
        count: executions per step.
        bytes: bytes of output on one device in all executions.
        seconds: time for which they occupy their stream in a step.
        exposed_s: part of this time for which kernels wait.
        is_async: whether all of them run on a stream of their own.
        is_overlapped: whether kernels run at the same time as some of them.
    """

    kind: str
    axes: tuple[str, ...]
    loop: str
    count: int
    bytes: int
    seconds: float
    exposed_s: float
    is_async: bool
    is_overlapped: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time of a step on one device; in a pipeline, on a device of the busiest stage.

    On simulated devices that share their cores, it is the mean over the stages.

    step_s = matmul_s + attention_s + other_s + exposed_communication_s + exposed_host_s + bubble_s

    Attributes:
        step_s: time of the step.
        matmul_s: matrix products and convolutions.
        attention_s: cuDNN's fused attention. Unfused attention counts as its matrix products.
        other_s: all other kernels: fusions, norms, copies within device memory.
        communication_s: collectives, whether or not kernels run at the same time.
        exposed_communication_s: part of communication_s for which kernels wait.
        host_s: copies to and from host memory, both directions added.
        exposed_host_s: part of host_s for which kernels wait.
        bubble_s: time for which the stage waits for other stages, in ticks in which they have more
            work.
        collectives: collectives in groups, the longest first.
        run: simulated execution.
    """

    step_s: float
    matmul_s: float
    attention_s: float
    other_s: float
    communication_s: float
    exposed_communication_s: float
    host_s: float
    exposed_host_s: float
    bubble_s: float
    collectives: tuple[CollectiveTime, ...]
    run: Execution = dataclasses.field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return everything except the run as a dict for `json.dumps`, with times in seconds."""
        fields = [field.name for field in dataclasses.fields(self) if field.name.endswith("_s")]
        collectives = [dataclasses.asdict(collective) for collective in self.collectives]
        return {name: getattr(self, name) for name in fields} | {"collectives": collectives}


def predict(
    text: str,
    mesh_shape: Mapping[str, int],
    machine: Machine,
    ticks: Ticks | None = None,
    temp_bytes: int = 0,
    expert_load: float = 1.0,
) -> Prediction:
    """Predict the time of a step.

    A loop counts as many iterations as XLA knows that it has, or one if XLA does not know. A
    conditional takes its longer branch, except in the ticks of a pipeline.

    Args:
        text: `compiled.as_text()` of the compiled step.
        mesh_shape: sizes of the mesh axes, in mesh order.
        machine: hardware. Consecutive devices belong to the same host.
        ticks: operations of the pipeline stages in each tick. Without it, every stage runs
            everything in every tick, so there is no bubble and the predicted step is too long.
        temp_bytes: bytes that the step allocates on a device and gives back. Allocating them counts
            as one of the other kernels.
        expert_load: tokens of the most chosen experts as a multiple of the mean. The busiest device
            has as many of these experts as possible, which bounds the time from above.

    Returns:
        The predicted time and its parts.

    Raises:
        ValueError: if the text does not contain exactly one program, or if the program is for
            another number of devices.
    """
    modules = parse_modules(text)
    if len(modules) != 1:
        raise ValueError(
            f"the text contains {len(modules)} programs; pass the text of one compiled step"
        )
    module = modules[0]
    program_collectives = collectives_of(module, mesh_shape)
    costs = Costs(module, mesh_shape, machine)
    if ticks is None or not machine.shares_cores:
        prediction = _predict_stage(costs, program_collectives, ticks, expert_load)
    else:
        stages = range(len(ticks.stages[0]))
        prediction = _mean(
            [
                _predict_stage(costs, program_collectives, ticks.of_stage(stage), expert_load)
                for stage in stages
            ]
        )
    allocation_s = temp_bytes * machine.allocation_s_per_byte
    return dataclasses.replace(
        prediction,
        step_s=prediction.step_s + allocation_s,
        other_s=prediction.other_s + allocation_s,
    )


def _predict_stage(
    costs: Costs, program_collectives: list[Collective], ticks: Ticks | None, expert_load: float
) -> Prediction:
    run = Simulator(costs, ticks, expert_load).step()
    totals = run.totals
    collectives = _group_collectives(run, program_collectives)
    of_category = totals.by_category
    exposed = sum(use.exposed_s for use in totals.collectives.values())
    known_s = sum(of_category[name] for name in ("matmul", "attention", "other", BUBBLE))
    # A step ends when its streams do, so work left on them after the last kernel is exposed.
    exposed_host_s = totals.exposed_host_s
    last_s = run.duration_s - known_s - exposed - exposed_host_s
    if any(lane in dict(run.busy) for lane in HOST_LANES):
        exposed_host_s += max(0.0, last_s)
    else:
        exposed += max(0.0, last_s)
    return Prediction(
        step_s=run.duration_s,
        matmul_s=of_category["matmul"],
        attention_s=of_category["attention"],
        other_s=of_category["other"],
        communication_s=sum(use.seconds for use in totals.collectives.values()),
        exposed_communication_s=exposed,
        host_s=of_category["to host"] + of_category["to device"],
        exposed_host_s=exposed_host_s,
        bubble_s=of_category[BUBBLE],
        collectives=collectives,
        run=run,
    )


def _mean(stages: list[Prediction]) -> Prediction:
    """Return the mean time of stages that share their cores; its collectives are the busiest's."""
    busiest = max(stages, key=lambda stage: stage.step_s)
    names = [each.name for each in dataclasses.fields(Prediction) if each.name.endswith("_s")]
    means = {name: sum(getattr(stage, name) for stage in stages) / len(stages) for name in names}
    return dataclasses.replace(busiest, **means)


def format_ms(seconds: float) -> str:
    """Format a time in milliseconds, with three digits if it is short."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def format_prediction(prediction: Prediction) -> str:
    """Format the parts of a step and its collectives as two tables."""
    parts = [
        ("matrix products", prediction.matmul_s),
        ("attention", prediction.attention_s),
        ("other kernels", prediction.other_s),
        ("exposed communication", prediction.exposed_communication_s),
        ("exposed host copies", prediction.exposed_host_s),
        ("pipeline bubble", prediction.bubble_s),
        ("step", prediction.step_s),
    ]
    lines = [f"{'predicted':<24}{'ms':>10}{'share':>8}"]
    for name, seconds in parts:
        share = seconds / prediction.step_s if prediction.step_s else 0.0
        lines.append(f"{name:<24}{1e3 * seconds:>10.2f}{share:>8.1%}")
    lines.append("")
    cells = [("collective", "axes", "loop", "count", "MiB", "ms", "exposed ms", "")]
    for row in prediction.collectives:
        how = "synchronous" if not row.is_async else "" if row.is_overlapped else "not overlapped"
        times = (f"{1e3 * row.seconds:.2f}", f"{1e3 * row.exposed_s:.2f}")
        name = (row.kind, ",".join(row.axes) or "-", row.loop or "-")
        cells.append((*name, str(row.count), f"{row.bytes / 2**20:,.1f}", *times, how))
    lines += align(cells, left=(0, 1, 2, 7)) if len(cells) > 1 else ["no collectives"]
    return "\n".join(lines)


def _group_collectives(
    run: Execution, program_collectives: list[Collective]
) -> tuple[CollectiveTime, ...]:
    """Return the collectives that ran, grouped by kind, mesh axes and loop."""
    groups: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
    for collective in {collective.name: collective for collective in program_collectives}.values():
        if collective.name in run.totals.collectives:
            key = (collective.kind, collective.axes, collective.loop)
            groups.setdefault(key, []).append(collective)
    rows = []
    for (kind, axes, loop), members in groups.items():
        uses = [run.totals.collectives[member.name] for member in members]
        pairs = zip(members, uses, strict=True)
        rows.append(
            CollectiveTime(
                kind=kind,
                axes=axes,
                loop=loop,
                count=sum(use.executions for use in uses),
                bytes=sum(member.bytes * use.executions for member, use in pairs),
                seconds=sum(use.seconds for use in uses),
                exposed_s=sum(use.exposed_s for use in uses),
                is_async=all(member.is_async for member in members),
                is_overlapped=any(member.is_overlapped for member in members),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.seconds))
