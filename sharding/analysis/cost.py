"""Predicts the time of a training step from the compiled GPU program.

    prediction = predict(compiled.as_text(), mesh.shape, machine, Ticks.of_plan(plan))
    print(format_prediction(prediction))

The program must be scheduled, as `compiled.as_text()` of a GPU program is. Compile it with
`Target.compiler_options()`, which make XLA write its own estimates into it.

What the parts do: kernel_time.py says how long an instruction takes, simulation.py runs the program
by these times, timeline.py draws the result.

What is left out: kernels that communication slows down, since both use the same memory; the time
between two steps, in which the host prepares a batch; clocks that a GPU lowers at its power limit.
So a prediction is for comparing plans, and for finding what a step waits for. Real steps tend to
take longer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sharding.analysis import audit, hlo
from sharding.analysis.kernel_time import Costs, Machine
from sharding.analysis.simulation import BUBBLE, HOST_LANES, Execution, Simulator, Ticks

__all__ = ["CollectiveTime", "Machine", "Prediction", "Ticks", "format_prediction", "predict"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """The collectives of one kind, set of axes and loop.

    Attributes:
      kind: as in `audit.Collective`.
      axes: as in `audit.Collective`.
      loop: as in `audit.Collective`.
      count: executions in a step.
      bytes: bytes of output on one device in all of them.
      seconds: for which they occupy their stream in a step.
      exposed_s: the part of it for which kernels wait.
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
    """Where the time of a step goes on one device, in a pipeline on one of the busiest stage.

    step_s = matmul_s + attention_s + other_s + exposed_communication_s + exposed_host_s + bubble_s

    Attributes:
      step_s: time of the step.
      matmul_s: matrix products and convolutions.
      attention_s: fused attention of cuDNN; attention in other forms counts as its products.
      other_s: all other kernels: fusions, norms, copies in device memory.
      communication_s: collectives, whether or not kernels run at the same time.
      exposed_communication_s: the part of it for which kernels wait.
      host_s: copies to and from host memory, both directions added.
      exposed_host_s: the part of it for which kernels wait.
      bubble_s: for which the stage waits for others in ticks where these do more than it does.
      collectives: the communication in groups, the longest first.
      run: what ran when.
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
        """Returns all but the run as what `json.dumps` takes, times in seconds."""
        fields = [field.name for field in dataclasses.fields(self) if field.name.endswith("_s")]
        collectives = [dataclasses.asdict(collective) for collective in self.collectives]
        return {name: getattr(self, name) for name in fields} | {"collectives": collectives}


def predict(
    text: str,
    mesh_shape: Mapping[str, int],
    machine: Machine,
    ticks: Ticks | None = None,
) -> Prediction:
    """Predicts the time of a step.

    Loops count as often as XLA knows that they run, else once. Conditionals take the longer branch,
    except those of a pipeline's tick.

    Args:
      text: `compiled.as_text()` of the compiled step.
      mesh_shape: sizes of the mesh's axes, in mesh order.
      machine: what it runs on. Devices are in the order of the hosts.
      ticks: what the stages of a pipeline run in its ticks. Without it every stage runs everything
        in every tick, so there is no bubble and the step is too long.

    Raises:
      ValueError: the text holds no program, or one for another number of devices.
    """
    modules = hlo.parse_modules(text)
    if len(modules) != 1:
        raise ValueError(f"the text holds {len(modules)} programs, but a step is one")
    module = modules[0]
    found = audit.collectives_of(module, mesh_shape)
    costs = Costs(module, mesh_shape, machine)
    run = Simulator(module, costs, ticks).step()
    totals, collectives = run.totals, _grouped(run, found)
    of_category = totals.by_category
    exposed = sum(use.exposed_s for use in totals.collectives.values())
    known_s = sum(of_category[name] for name in ("matmul", "attention", "other", BUBBLE))
    # What streams still do after the last kernel is waited for at the end of the step.
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


def format_prediction(prediction: Prediction) -> str:
    """Returns the parts of a step and its collectives as two tables."""
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
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [
            cell.ljust(width) if column in (0, 1, 2, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    if len(cells) == 1:
        lines[-1] = "no collectives"
    return "\n".join(lines)


def _grouped(run: Execution, found: list[audit.Collective]) -> tuple[CollectiveTime, ...]:
    """Returns the collectives that ran, those of one kind, set of axes and loop together."""
    groups: dict[tuple[str, tuple[str, ...], str], list[audit.Collective]] = {}
    for collective in {collective.name: collective for collective in found}.values():
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
