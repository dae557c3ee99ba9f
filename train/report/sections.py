"""The parts of a report that are no curves: bars, pictures and tables.

Everything here is data for the scripts of the page: bars have names and lengths, and tables have
rows of texts.
"""

import base64
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.schedule import make_schedule
from pipeline.schedules.drawing import picture_as_svg
from pipeline.schedules.simulate import OperationTimes
from sharding.labels import GAPS, LABELS, TEMPORARIES
from sharding.mesh import AXES
from train.goodput import CAUSES, Attempt, down_s
from train.lifecycle.phases import NAMES, RECOMPUTED
from train.planning.memory.budget import size
from train.report.run_records import RunRecord
from train.report.series import Axis, evaluated_losses, number_of, unit_of
from untrusted.messages import sentence_of

#: Labels of planned memory, in the order in which `memory.txt` lists them.
MEMORY_KINDS = (*LABELS[:2], "optimizer", LABELS[2], TEMPORARIES, GAPS, "batch", "as compiled")
#: Kinds of time, the productive one first.
TIME_KINDS = ("step", *CAUSES)
_SCHEDULE_KEYS = (
    "pipeline.schedule",
    "mesh.pipeline",
    "train.num_microbatches",
    "pipeline.chunks",
)
#: A schedule with more operations is too small to read in a picture.
_MAX_OPERATIONS = 1500
#: Most prompts of a run, continuations of a prompt, and characters of a continuation.
_MAX_PROMPTS = 16
_MAX_SAMPLES = 24
_MAX_CHARACTERS = 4000
#: How many validation sets the summary shows.
_MAX_SETS = 4


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a bar, from `start` to `start + length`."""

    kind: str
    start: float
    length: float
    text: str = ""  # added to the text that the page shows for the box


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A bar with a label."""

    run: int  # index of the run
    label: str
    boxes: Sequence[Box]
    mark: float | None = None  # position of a vertical line


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary(runs: Sequence[RunRecord], axes: Sequence[Axis]) -> Table:
    """Return one row per run with its most important numbers; columns without any are left out."""
    evaluated = sorted({loss for run in runs for loss in evaluated_losses(run)})[:_MAX_SETS]
    rows = []
    columns: dict[str, None] = {}
    for run, axis in zip(runs, axes, strict=True):
        rows.append(_summary_of(run, axis, evaluated))
        columns |= dict.fromkeys(rows[-1])
    used = [name for name in columns if any(row[name] != "–" for row in rows)]
    return Table(columns=used, rows=[[row[name] for name in used] for row in rows])


def _summary_of(run: RunRecord, axis: Axis, evaluated: Sequence[str]) -> dict[str, str]:
    """Return the numbers of a run by their names, as texts; "–" is unknown."""
    losses = _finite(run, "loss")
    unit = unit_of(run)
    rates = _finite(run, f"{unit}_per_s")
    mfu = _finite(run, "mfu")
    compiled = None if run.facts is None else run.facts["memory"].get("compiled_device")
    sizes = [
        f"{name}={run.config[key]}"
        for name in AXES
        if run.config.get(key := f"mesh.{name}", 1) != 1
    ]
    best = {
        f"best {name}": f"{min(values):.4f}" if (values := _finite(run, name)) else "–"
        for name in evaluated
    }
    return {
        "run": run.name,
        "steps": f"{axis.steps[-1]:,}" if axis.steps else "–",
        "trained on": f"{axis.units[-1]:,} {unit}" if axis.units else "–",
        "loss": f"{losses[-1]:.4f}" if losses else "–",
        **best,
        "throughput": f"{statistics.median(rates):,.0f} {unit}/s" if rates else "–",
        "MFU": f"{statistics.median(mfu):.1%}" if mfu else "–",
        "memory as compiled": "–" if compiled is None else size(compiled),
        "goodput": "–" if run.goodput is None else f"{run.goodput.fraction:.1%}",
        "mesh": "\u00a0×\u00a0".join(sizes) or ("one device" if run.config else "–"),
    }


def _finite(run: RunRecord, metric: str) -> list[float]:
    values = (number_of(entry.get(metric)) for entry in run.entries)
    return [value for value in values if value is not None]


def memory_lanes(runs: Sequence[RunRecord]) -> list[Lane]:
    """Return the planned and the compiled memory of a device, in bytes; the mark is the budget."""
    lanes = []
    for index, run in enumerate(runs):
        if run.facts is None:
            continue
        memory = run.facts["memory"]
        mark = memory.get("device_budget")
        lanes.append(_stacked(index, "planned", memory["planned_device"], MEMORY_KINDS, mark))
        if memory.get("compiled_device") is not None:
            compiled = {"as compiled": memory["compiled_device"]}
            lanes.append(_stacked(index, "as compiled", compiled, MEMORY_KINDS, mark))
        if any(memory["planned_host"].values()):
            host = memory["planned_host"]
            lanes.append(_stacked(index, "planned, a host", host, MEMORY_KINDS, None))
    return lanes


def _stacked(
    run: int, label: str, sizes: Mapping[str, int], order: Sequence[str], mark: float | None
) -> Lane:
    """Return a bar of bytes by label."""
    boxes = []
    start = 0
    for kind in [*order, *sorted(sizes.keys() - {*order})]:
        if sizes.get(kind, 0) > 0:
            boxes.append(Box(kind=kind, start=start, length=sizes[kind]))
            start += sizes[kind]
    return Lane(run=run, label=label, boxes=boxes, mark=mark)


def time_lanes(runs: Sequence[RunRecord]) -> list[Lane]:
    """Return a bar for each run with the time of all its starts, in seconds since the first one.

    A start has recorded how long its phases took, and not when they were, so each start shows its
    phases one after another.
    """
    lanes = []
    for index, run in enumerate(runs):
        if run.goodput is None:
            continue
        boxes: list[Box] = []
        end = 0.0
        starts = run.goodput.starts
        for start, after in zip(starts, [*starts[1:], None], strict=True):
            for kind, length in _phases(start):
                text = f"start {start.number}, steps {start.first_step} to {start.last_step}"
                boxes.append(Box(kind=kind, start=end, length=length, text=text))
                end += length
            gap = 0.0 if after is None else down_s(start, after)
            if gap:
                text = f"between start {start.number} and the next one"
                boxes.append(Box(kind="down", start=end, length=gap, text=text))
                end += gap
        lanes.append(Lane(run=index, label="", boxes=boxes))
    return lanes


def _phases(start: Attempt) -> list[tuple[str, float]]:
    """Return the phases of a start and their seconds, in the order in which they first occur."""
    known = [(name, start.seconds.get(name, 0.0)) for name in NAMES if name != "other"]
    other = sum(s for name, s in start.seconds.items() if name not in NAMES or name == "other")
    phases = [*known, (RECOMPUTED, start.recomputed_s), ("other", other)]
    return [(name, length) for name, length in phases if length > 0]


def goodput_table(runs: Sequence[RunRecord]) -> Table:
    """Return how the time of each run was spent, in seconds, and its goodput."""
    with_goodput = [(run.name, run.goodput) for run in runs if run.goodput is not None]
    rows = [
        ["goodput", *(f"{goodput.fraction:.1%}" for _, goodput in with_goodput)],
        ["starts", *(str(len(goodput.starts)) for _, goodput in with_goodput)],
        ["total, s", *(f"{goodput.total_s:,.1f}" for _, goodput in with_goodput)],
        ["productive, s", *(f"{goodput.productive_s:,.1f}" for _, goodput in with_goodput)],
    ]
    for cause in CAUSES:
        seconds = [goodput.lost_s.get(cause, 0.0) for _, goodput in with_goodput]
        if any(seconds):
            rows.append([f"{cause}, s", *(f"{each:,.1f}" for each in seconds)])
    return Table(columns=["", *(name for name, _ in with_goodput)], rows=rows)


@dataclass(frozen=True, kw_only=True)
class SchedulePicture:
    """The picture of a pipeline schedule, as a data: URL of an SVG."""

    caption: str
    source: str
    runs: list[str]  # names of the runs that use it


def schedule_pictures(runs: Sequence[RunRecord]) -> list[SchedulePicture]:
    """Return the schedules of runs with several pipeline stages, each once.

    A schedule that cannot be drawn becomes a problem of its run.
    """
    pictures: dict[tuple[Any, ...], SchedulePicture] = {}
    for run in runs:
        for file, config in run.configs:
            is_newest = config is run.config
            user = run.name if is_newest else f"{run.name}/{file}"
            try:
                _add_schedule(pictures, user, config)
            except (ValueError, OSError) as error:
                run.problems.append(f"the schedule of {user} is not drawn: {sentence_of(error)}")
    return [*pictures.values()]


def _add_schedule(
    pictures: dict[tuple[Any, ...], SchedulePicture], user: str, config: Mapping[str, Any]
) -> None:
    """Draw the schedule of a config, unless it has one stage or its schedule is drawn already."""
    name, *values = (config.get(key) for key in _SCHEDULE_KEYS)
    counts = [value for value in values if type(value) is int]
    if not isinstance(name, str) or len(counts) < len(values) or counts[0] <= 1:
        return
    key = (name, *counts)
    if key not in pictures:
        svg = _draw(name, *counts)
        pictures[key] = SchedulePicture(
            caption=f"{name}: {counts[0]} stages, {counts[1]} microbatches, {counts[2]} chunk(s)",
            source=f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}",
            runs=[],
        )
    pictures[key].runs.append(user)


def _draw(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> str:
    num_operations = 2 * num_stages * num_microbatches * num_chunks
    if num_operations > _MAX_OPERATIONS:
        raise ValueError(
            f"it has about {num_operations:,} operations; python -m pipeline.schedule --picture "
            "draws it as a file"
        )
    schedule = make_schedule(name, num_stages, num_microbatches, num_chunks)
    return picture_as_svg(schedule, OperationTimes(), "synchronous")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The continuations of a prompt of a run, with a row for each step."""

    run: str
    prompt: str
    table: Mapping[str, Any]  # fields of a Table


def samples(runs: Sequence[RunRecord]) -> list[Samples]:
    """Return the continuations of each prompt of each run, at most _MAX_SAMPLES per prompt."""
    result = []
    for run in runs:
        # A run that is killed and resumed repeats steps; the last line of a step counts.
        texts: dict[str, dict[int, str]] = {}
        for entry in run.samples:
            texts.setdefault(entry["prompt"], {})[entry["step"]] = entry["text"]
        for prompt, of_step in [*texts.items()][:_MAX_PROMPTS]:
            steps = _evenly([*of_step], _MAX_SAMPLES)
            rows = [[f"{step:,}", of_step[step].rstrip()[:_MAX_CHARACTERS]] for step in steps]
            table = Table(columns=["step", "continuation"], rows=rows)
            result.append(Samples(run=run.name, prompt=prompt, table=vars(table)))
    return result


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of these steps, at about equal distances, the first and last always."""
    if len(steps) <= most:
        return [*steps]
    last = len(steps) - 1
    return [steps[i * last // (most - 1)] for i in range(most)]


def config_differences(runs: Sequence[RunRecord]) -> Table:
    """Return the config keys in which runs differ, with the value of each run."""
    return _differing([(run.name, run.config) for run in runs if run.configs])


def config_changes(run: RunRecord) -> Table:
    """Return the config keys that starts of a run have changed, with the value in each file."""
    return _differing(run.configs)


def _differing(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return the keys in which named configs differ, with the value in each."""
    keys = sorted({key for _, config in configs for key in config})
    texts = {key: [_value(config, key) for _, config in configs] for key in keys}
    rows = [[key, *values] for key, values in texts.items() if len({*values}) > 1]
    return Table(columns=["key", *(name for name, _ in configs)], rows=rows)


def whole_config(run: RunRecord) -> Table:
    """Return all keys of a run's newest config."""
    rows = [[key, _value(run.config, key)] for key in run.config]
    return Table(columns=["key", "value"], rows=rows)


def _value(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return "–"
    value = config[key]
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def environment(runs: Sequence[RunRecord]) -> Table:
    """Return the machine, the software and the model of each run."""
    with_facts = [(run.name, run.facts) for run in runs if run.facts is not None]
    rows = []
    for part in ("machine", "model", "software"):
        names = dict.fromkeys(name for _, facts in with_facts for name in facts[part])
        for name in names:
            values = (facts[part].get(name, "–") for _, facts in with_facts)
            rows.append([name, *map(_text, values)])
    return Table(columns=["", *(name for name, _ in with_facts)], rows=rows)


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)
