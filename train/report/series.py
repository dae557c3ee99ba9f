"""Puts the metrics of runs into charts.

A metric of an evaluation has the name of the metric of a step with `eval_` in front of it, and
between the two the name of a validation set. Both belong into the same chart:

    loss, eval_loss, eval_wiki_loss          "Loss" with the curves training, evaluation, wiki
    tokens_per_s                             "Throughput"
    a metric without a line in the table     a chart with its name

The x axis of all charts shows steps, tokens (or images), or hours. `Axis` has the three for every
step of a run that logged something; a curve refers to them by index.
"""

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.batch_sizes import BatchSizes
from data.config import DataConfig
from data.named_paths import split_name
from train.report.run_records import RunRecord

#: Maximum number of points of a curve. A longer one is thinned out, without losing its extremes.
MAX_POINTS = 2000
_EVALUATION = "eval_"


@dataclass(frozen=True, kw_only=True)
class ChartKind:
    """How some metrics are shown."""

    section: str
    title: str
    metrics: Mapping[str, str]  # metric -> label of its curve, if it has several
    unit: str = ""
    percent: bool = False
    from_zero: bool = False  # whether the y axis starts at 0
    reference: float | None = None  # value of a dashed line


_KINDS = (
    ChartKind(section="Quality", title="Loss", metrics={"loss": ""}),
    ChartKind(section="Quality", title="Perplexity", metrics={"perplexity": ""}),
    ChartKind(section="Quality", title="Accuracy", metrics={"accuracy": ""}, percent=True),
    ChartKind(section="Optimization", title="Learning rate", metrics={"learning_rate": ""}),
    ChartKind(section="Optimization", title="Gradient norm", metrics={"grad_norm": ""}),
    ChartKind(section="Optimization", title="Loss scale", metrics={"loss_scale": ""}),
    ChartKind(
        section="Optimization",
        title="Skipped steps",
        metrics={
            "num_skipped": "skipped in all",
            "num_nonfinite_in_a_row": "not finite in a row",
            "num_stuck_in_a_row": "stuck in a row",
        },
        from_zero=True,
    ),
    ChartKind(
        section="Experts",
        title="Load of experts",
        unit="1 is the mean",
        metrics={"expert_load_max": "most chosen", "expert_load_min": "least chosen"},
        reference=1.0,
    ),
    ChartKind(
        section="Experts",
        title="Entropy of the routers",
        unit="nats",
        metrics={"router_entropy": ""},
    ),
    ChartKind(
        section="Experts",
        title="Dropped choices",
        metrics={"dropped_tokens": ""},
        percent=True,
        from_zero=True,
    ),
    ChartKind(
        section="Speed",
        title="Throughput",
        unit="tokens/s",
        metrics={"tokens_per_s": ""},
        from_zero=True,
    ),
    ChartKind(
        section="Speed",
        title="Throughput",
        unit="images/s",
        metrics={"images_per_s": ""},
        from_zero=True,
    ),
    ChartKind(
        section="Speed",
        title="Model FLOPs utilization (MFU)",
        metrics={"mfu": ""},
        percent=True,
        from_zero=True,
    ),
    ChartKind(
        section="Speed",
        title="Time of a step",
        unit="s",
        metrics={"step_time_s": "step", "data_wait_s": "of it, waiting for data"},
        from_zero=True,
    ),
)
#: Charts that are left out if they show nothing but zeros.
_HIDDEN_IF_ZERO = ("Skipped steps", "Dropped choices")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The steps of a run at which it logged something."""

    steps: Sequence[int]
    units: Sequence[int] | None  # tokens or images so far; None: unknown
    hours: Sequence[float] | None  # time in training steps so far; None: unknown


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run."""

    run: int  # index of the run
    label: str
    metric: str  # name in metrics.jsonl
    at: Sequence[int]  # index of each point in the run's Axis
    values: Sequence[float | None]  # None: not finite


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share their axes."""

    kind: ChartKind
    curves: Sequence[Curve]


def axis_of(run: RunRecord) -> Axis:
    """Return the steps at which a run logged something, in tokens and hours too.

    Hours are the sum of the step times, without evaluations, saves and the time between two starts.
    """
    steps = sorted({entry["step"] for entry in run.entries})
    per_step = _units_per_step(run)
    sizes = _batch_sizes(run)
    seconds: dict[int, float] = {}
    total_s = 0.0
    last = 0
    for entry in run.entries:
        step_time_s = number_of(entry.get("step_time_s"))
        if step_time_s is not None and entry["step"] > last:
            total_s += step_time_s * (entry["step"] - last)
            last = entry["step"]
        seconds[entry["step"]] = total_s
    return Axis(
        steps=steps,
        units=(
            None
            if per_step is None
            else [per_step * sizes.first_element(step) // sizes.full.size for step in steps]
        ),
        hours=[seconds[step] / 3600 for step in steps] if 0 < total_s < math.inf else None,
    )


def unit_of(run: RunRecord) -> str:
    """Return the unit in which a run counts its data: "tokens" or "images"."""
    if run.facts is not None:
        return f"{run.facts['unit']}s"
    return "images" if any("images_per_s" in entry for entry in run.entries) else "tokens"


def evaluated_losses(run: RunRecord) -> set[str]:
    """Return the names of the losses of a run's validation sets, such as "eval_wiki_loss"."""
    names = {name for entry in run.entries for name in entry if name.startswith(_EVALUATION)}
    sets = _validation_sets(run)
    return {name for name in names if _base(name, sets) == "loss"}


def _units_per_step(run: RunRecord) -> int | None:
    """Return the tokens or images of a full batch, from run.json or from the throughput."""
    if run.facts is not None:
        return run.facts["units_per_step"]
    products = [
        rate * step_time_s
        for entry in run.entries
        for name in ("tokens_per_s", "images_per_s")
        if (rate := number_of(entry.get(name))) is not None
        and (step_time_s := number_of(entry.get("step_time_s"))) is not None
    ]
    return round(statistics.median(products)) if products else None


def _batch_sizes(run: RunRecord) -> BatchSizes:
    """Return the batch sizes of a run's steps; without a usable config, they are the same."""
    size = run.config.get("data.global_batch_size")
    rampup = run.config.get("data.rampup_batch_size")
    if isinstance(size, int) and isinstance(rampup, list | tuple):
        with contextlib.suppress(ValueError):
            config = DataConfig(global_batch_size=size, rampup_batch_size=tuple(rampup))
            return config.batch_sizes
    return BatchSizes.of(1)


def charts_of(runs: Sequence[RunRecord], axes: Sequence[Axis]) -> list[Chart]:
    """Return the charts of some runs, in the order in which a page shows them.

    Args:
        axes: axis of each run.
    """
    curves: dict[str, list[Curve]] = {}  # by metric of a step
    for index, (run, axis) in enumerate(zip(runs, axes, strict=True)):
        sets = _validation_sets(run)
        names = {name for entry in run.entries for name in entry} - {"step"}
        for metric in sorted(names, key=lambda name: (name.startswith(_EVALUATION), name)):
            curve = _curve(run, axis, index, metric, _label(metric, sets))
            if curve is not None:
                curves.setdefault(_base(metric, sets), []).append(curve)
    charts = []
    for kind in (*_KINDS, *_kinds_of_others(curves)):
        in_chart = [
            _with_label(curve, label)
            for name, label in kind.metrics.items()
            for curve in curves.get(name, ())
        ]
        is_zero = all(not value for curve in in_chart for value in curve.values)
        if in_chart and not (is_zero and kind.title in _HIDDEN_IF_ZERO):
            charts.append(Chart(kind=kind, curves=in_chart))
    sections = [*dict.fromkeys(kind.section for kind in _KINDS)]
    return sorted(charts, key=lambda chart: sections.index(chart.kind.section))


def _kinds_of_others(metrics: Mapping[str, Any]) -> list[ChartKind]:
    """Return a kind of chart for each metric without one."""
    known = {name for kind in _KINDS for name in kind.metrics}
    return [
        ChartKind(section="Quality", title=name, metrics={name: ""})
        for name in sorted(metrics.keys() - known)
    ]


def _validation_sets(run: RunRecord) -> list[str]:
    """Return the names of a run's validation sets, the longest first."""
    paths = run.config.get("data.validation_paths") or ()
    splits = run.config.get("data.validation_splits") or ()
    names = {split_name(path)[0] for path in paths if isinstance(path, str)}
    names |= {split for split in splits if isinstance(split, str)}
    return sorted(names - {""}, key=len, reverse=True)


def _base(metric: str, sets: Sequence[str]) -> str:
    """Return the metric of a step that belongs to a metric: "loss" for "eval_wiki_loss"."""
    if not metric.startswith(_EVALUATION):
        return metric
    return metric.removeprefix(_EVALUATION).removeprefix(f"{_set_of(metric, sets)}_")


def _label(metric: str, sets: Sequence[str]) -> str:
    """Return the label of a metric's curve: "training", "evaluation" or the validation set."""
    if not metric.startswith(_EVALUATION):
        return "training"
    return _set_of(metric, sets) or "evaluation"


def _set_of(metric: str, sets: Sequence[str]) -> str:
    return next((name for name in sets if metric.startswith(f"{_EVALUATION}{name}_")), "")


def _with_label(curve: Curve, label: str) -> Curve:
    """Return a curve with the label of its metric in a chart of several metrics."""
    if not label:
        return curve
    label = label if curve.label == "training" else f"{label}, {curve.label}"
    return Curve(**{**vars(curve), "label": label})


def _curve(run: RunRecord, axis: Axis, index: int, metric: str, label: str) -> Curve | None:
    """Return the curve of a metric; None if none of its values is a number."""
    place = {step: i for i, step in enumerate(axis.steps)}
    # If a step was logged twice, the last value counts.
    points = {
        place[entry["step"]]: number_of(entry[metric])
        for entry in run.entries
        if isinstance(entry.get(metric), int | float) and type(entry[metric]) is not bool
    }
    if not any(value is not None for value in points.values()):
        return None
    at = _thinned([*points], [*points.values()])
    return Curve(run=index, label=label, metric=metric, at=at, values=[points[i] for i in at])


def number_of(value: Any) -> float | None:
    """Return a number that JSON can store; None if it is not finite, or no number."""
    if not isinstance(value, int | float) or type(value) is bool:
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _thinned(at: list[int], values: list[float | None]) -> list[int]:
    """Return at most MAX_POINTS of some indices: the smallest and largest value of each bucket."""
    if len(at) <= MAX_POINTS:
        return at
    # Each bucket gives at most three points: the least, the greatest, and one that is not finite.
    size = math.ceil(3 * len(at) / MAX_POINTS)
    chosen = set()
    for start in range(0, len(at), size):
        bucket = range(start, min(start + size, len(at)))
        chosen |= {*[i for i in bucket if values[i] is None][:1]}
        finite = [(value, i) for i in bucket if (value := values[i]) is not None]
        chosen |= {min(finite)[1], max(finite)[1]} if finite else set()
    return [at[i] for i in sorted(chosen)]
