"""Draws a predicted step as an SVG picture.

    Path("step.svg").write_text(draw(prediction))

The picture has a lane for kernels and one for each kind of communication. It divides the step into
columns of time, and spreads anything shorter than a column evenly over it, because the simulated
step is a tree that is far smaller than the list of all its events.
"""

import collections
import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from pipeline.runtime.tick_table import TICKS
from predict.time.execution import BUBBLE, HOST_LANES, Event, Execution, Repeat
from predict.time.lanes import lane_of, lanes_of, seconds_by_lane
from predict.time.prediction import Prediction, format_ms

#: category -> (name, colour). Okabe and Ito's palette, which colour-blind readers can tell apart.
_KERNELS = {
    "matmul": ("matrix products", "#0072b2"),
    "attention": ("attention", "#d55e00"),
    "other": ("other kernels", "#f0c04a"),
    BUBBLE: ("waits for other stages", "#d9d9d9"),
}
_COMMUNICATION = ("communication", "#009e73")
_HOST = ("host copies", "#cc79a7")
#: Share of a step that a loop must take to be labelled in the picture.
_SHORTEST_BRACKET = 0.06
_WIDTH = 1240
_LEFT = 190
_TOP = 92
_LANE = 34
_GAP = 12
_LEAST = 1.5  # height of the shortest event in pixels
_COLUMNS = 1026  # number of columns of time, one pixel wide each


def draw(prediction: Prediction, title: str = "") -> str:
    """Return the step as an SVG picture.

    Args:
        prediction: step.
        title: name of the step; "predicted" and the time are added.
    """
    step_s = prediction.step_s or 1e-9
    lanes = lanes_of(prediction.run)
    columns = _Columns(step_s)
    columns.add(prediction.run, 0.0)
    bottom = _TOP + len(lanes) * (_LANE + _GAP)
    height = bottom + 92
    seconds: dict[str, float] = collections.defaultdict(float)
    for (lane, _), value in seconds_by_lane(prediction.run).items():
        seconds[lane] += value
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" '
        'font-size="12" fill="#222222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_heading(prediction, title),
        *_axis(step_s, bottom),
        *_brackets(prediction.run, step_s),
    ]
    for row, lane in enumerate(lanes):
        top = _TOP + row * (_LANE + _GAP)
        parts += _draw_lane(f"{lane} {format_ms(seconds[lane])}", lane, top, columns)
    parts += _legend(prediction, bottom + 48)
    return "\n".join([*parts, "</svg>", ""])


class _Columns:
    """The share of each column of time that each category takes on each lane.

    Args:
        step_s: time that all columns together represent.
    """

    def __init__(self, step_s: float):
        self._column_s = step_s / _COLUMNS
        self.shares: dict[str, dict[str, list[float]]] = {}  # lane -> category -> share per column
        self._sums: dict[int, list[tuple[str, str, float]]] = {}  # id of an execution -> its sums

    def add(self, run: Execution, start_s: float) -> None:
        """Add an execution that begins at a time."""
        for item in run.items:
            at_s = start_s + item.start_s
            if isinstance(item, Event):
                self._fill(item.lane, item.category, at_s, item.duration_s, item.duration_s)
            elif item.run.duration_s > self._column_s:
                for i in range(item.count):
                    self.add(item.run, at_s + i * item.run.duration_s)
            else:
                duration_s = item.count * item.run.duration_s
                for lane, category, seconds in self._sum(item.run):
                    self._fill(lane, category, at_s, duration_s, item.count * seconds)

    def _fill(
        self, lane: str, category: str, start_s: float, duration_s: float, seconds: float
    ) -> None:
        """Spread seconds of work evenly over an interval of time."""
        empty = [0.0] * _COLUMNS
        share = self.shares.setdefault(lane_of(lane), {}).setdefault(category, empty)
        start = start_s / self._column_s
        stop = (start_s + duration_s) / self._column_s
        per_column = seconds / self._column_s / max(stop - start, 1e-12)
        for column in range(int(start), min(_COLUMNS, math.ceil(stop))):
            covered = min(stop, column + 1) - max(start, column)
            share[column] += covered * per_column

    def _sum(self, run: Execution) -> list[tuple[str, str, float]]:
        if id(run) not in self._sums:
            sums = seconds_by_lane(run)
            self._sums[id(run)] = [(*key, seconds) for key, seconds in sums.items()]
        return self._sums[id(run)]


def _draw_lane(label: str, lane: str, top: float, columns: _Columns) -> Iterator[str]:
    """Yield the SVG elements of a lane: its name, its background, and a path per category.

    The categories are stacked within a column, and the rest of a column is idle time.
    """
    middle = top + _LANE / 2
    yield (
        f'<text x="{_LEFT - 10}" y="{middle}" text-anchor="end" dominant-baseline="central">'
        f"{escape(label)}</text>"
    )
    yield (f'<rect x="{_LEFT}" y="{top}" width="{_COLUMNS}" height="{_LANE}" fill="#f4f4f4"/>')
    filled = [0.0] * _COLUMNS
    shares = columns.shares.get(lane, {})
    order = [*_KERNELS, *(category for category in shares if category not in _KERNELS)]
    for category in order:
        if category not in shares:
            continue
        outline = []
        for column, share in enumerate(shares[category]):
            low = filled[column]
            filled[column] = min(1.0, filled[column] + share)
            tall = round(_LANE * (filled[column] - low), 1)
            if share and not low:
                tall = max(tall, _LEAST)
            if tall > 0:
                base = round(top + _LANE * (1 - low), 1)
                outline.append((column, base, tall))
        boxes = "".join(
            f"M{_LEFT + column} {base:g}h{width}v{-tall:g}h{-width}z"
            for column, width, base, tall in _merge_columns(outline)
        )
        if boxes:
            _, colour = _style(category)
            yield f'<path d="{boxes}" fill="{colour}" shape-rendering="crispEdges"/>'


def _merge_columns(
    outline: list[tuple[int, float, float]],
) -> Iterator[tuple[int, int, float, float]]:
    """Yield (first column, number of columns, base, height) of runs of equal columns."""
    run: tuple[int, int, float, float] | None = None
    for column, base, tall in outline:
        if run is not None and run[0] + run[1] == column and run[2:] == (base, tall):
            run = (run[0], run[1] + 1, base, tall)
            continue
        if run is not None:
            yield run
        run = (column, 1, base, tall)
    if run is not None:
        yield run


def _heading(prediction: Prediction, title: str) -> Iterator[str]:
    heading = f"{title}: predicted step" if title else "predicted step"
    yield (
        f'<text x="{_LEFT}" y="26" font-size="16" font-weight="bold">'
        f"{escape(heading)}, {format_ms(prediction.step_s)} ms</text>"
    )
    yield (
        f'<text x="{_LEFT}" y="46" fill="#666666">'
        "from the compiled program and XLA’s cost model, not measured; in each column of time, "
        "the coloured part is busy</text>"
    )


def _axis(step_s: float, bottom: float) -> Iterator[str]:
    """Yield the time axis in milliseconds, with grid lines behind the lanes."""
    step_ms = 1e3 * step_s
    unit = 10.0 ** math.floor(math.log10(step_ms / 5))
    tick_ms = next(unit * factor for factor in (1, 2, 5, 10) if step_ms / (unit * factor) <= 12)
    for i in range(int(step_ms / tick_ms + 1e-9) + 1):
        x = round(_LEFT + _COLUMNS * i * tick_ms / step_ms, 1)
        yield f'<path d="M{x:g} {_TOP - 4}V{bottom - _GAP + 6}" stroke="#cccccc"/>'
        yield (
            f'<text x="{x:g}" y="{bottom + 12}" text-anchor="middle" fill="#444444">'
            f"{i * tick_ms:,g}</text>"
        )
    yield (f'<text x="{_LEFT - 10}" y="{bottom + 12}" text-anchor="end" fill="#444444">ms</text>')


def _brackets(run: Execution, step_s: float) -> Iterator[str]:
    """Yield a labelled bracket above each outermost loop that is long enough."""
    loops: list[tuple[str, float, float, int]] = []  # (label, start, end, iterations)
    for item in run.items:
        if not isinstance(item, Repeat):
            continue
        end_s = item.start_s + item.count * item.run.duration_s
        if loops and loops[-1][0] == item.label == TICKS:
            label, start_s, _, count = loops.pop()
            loops.append((label, start_s, end_s, count + item.count))
        else:
            loops.append((item.label, item.start_s, end_s, item.count))
    for label, start_s, end_s, count in loops:
        if label and end_s - start_s > _SHORTEST_BRACKET * step_s:
            left, right = (round(_LEFT + _COLUMNS * t / step_s, 1) for t in (start_s, end_s))
            y = _TOP - 14
            name = f"{label.replace('_', ' ')} × {count}"
            outline = f"M{left:g} {y + 6}V{y}H{right:g}V{y + 6}"
            yield f'<path d="{outline}" stroke="#666666" fill="none"/>'
            yield (
                f'<text x="{(left + right) / 2:g}" y="{y - 5}" text-anchor="middle" '
                f'font-size="11" fill="#444444">{escape(name)}</text>'
            )


def _legend(prediction: Prediction, y: float) -> Iterator[str]:
    """Yield a coloured box, a name and a time for each part that the step has."""
    exposed_s = prediction.exposed_communication_s
    parts = [
        (*_KERNELS["matmul"], prediction.matmul_s, ""),
        (*_KERNELS["attention"], prediction.attention_s, ""),
        (*_KERNELS["other"], prediction.other_s, ""),
        (*_KERNELS[BUBBLE], prediction.bubble_s, ""),
        (*_COMMUNICATION, prediction.communication_s, f", {format_ms(exposed_s)} exposed"),
        (*_HOST, prediction.host_s, f", {format_ms(prediction.exposed_host_s)} exposed"),
    ]

    x = float(_LEFT)
    for name, colour, seconds, more in parts:
        if not seconds:
            continue
        label = f"{name} {format_ms(seconds)} ms{more}"
        width = 18 + 6.9 * len(label) + 20
        if x + width > _WIDTH:
            x = float(_LEFT)
            y = y + 20
        yield f'<rect x="{x:g}" y="{y - 6}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18:g}" y="{y}" dominant-baseline="central">{escape(label)}</text>'
        x += width


def _style(category: str) -> tuple[str, str]:
    if category in _KERNELS:
        return _KERNELS[category]
    return _HOST if category in HOST_LANES else _COMMUNICATION
