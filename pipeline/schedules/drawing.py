"""Draws schedule tables as text and as Gantt charts."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.schedules.simulate import (
    CLOCKS,
    OperationTimes,
    Span,
    free_running_spans,
    synchronous_spans,
)
from pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Op,
    Schedule,
)

#: Okabe and Ito's palette, which colour-blind readers can distinguish.
_COLOURS = {
    FORWARD: ("forward", "#0072b2"),
    BACKWARD: ("backward", "#d55e00"),
    INPUT_GRADIENT: ("input gradient", "#e69f00"),
    WEIGHT_GRADIENT: ("weight gradient", "#009e73"),
}
#: Share of white in the colour of a stage's last chunk; earlier chunks are darker.
_LIGHTEST = 0.6
_BOX_HEIGHT = 0.86
_SPANS = {"free": free_running_spans, "synchronous": synchronous_spans}


def draw_text(schedule: Schedule) -> str:
    """Return the table as text: one line per stage, one column per tick.

    With several chunks, a letter names the chunk: F3b is the forward of microbatch 3 through the
    stage's second chunk.
    """
    cells = [
        ["".join(_op_text(op, schedule.num_chunks) for op in cell) or "." for cell in row]
        for row in schedule.ticks
    ]
    widths = [max(map(len, (str(tick), *row))) for tick, row in enumerate(cells)]

    def line(head: str, texts: list[str]) -> str:
        padded = (f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
        return f"{head:<8}{' '.join(padded)}".rstrip()

    stages = range(schedule.num_stages)
    return "\n".join(
        [
            line("tick", [str(tick) for tick in range(len(cells))]),
            *(line(f"stage {stage}", [row[stage] for row in cells]) for stage in stages),
        ]
    )


def draw_picture(schedule: Schedule, times: OperationTimes, clock: str, path: str | Path) -> None:
    """Write a Gantt chart with one lane per stage, as SVG or PNG depending on the path's suffix.

    Numbers are microbatches; later chunks of a stage are lighter. The same table always produces
    the same bytes.

    Args:
        schedule: table.
        times: time of each kind of operation.
        clock: key of CLOCKS.
        path: output file; must end in .svg or .png.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"the picture {str(path)!r} must end in .svg or .png")
    if path.suffix == ".svg":
        path.write_text(picture_as_svg(schedule, times, clock), encoding="utf-8")
    else:
        with _figure(schedule, times, clock) as figure:
            figure.savefig(path, dpi=160)


def picture_as_svg(schedule: Schedule, times: OperationTimes, clock: str) -> str:
    """Return the picture of `draw_picture` as SVG; the arguments are the same."""
    svg = io.StringIO()
    with _figure(schedule, times, clock) as figure:
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return _shorten(svg.getvalue())


@contextlib.contextmanager
def _figure(schedule: Schedule, times: OperationTimes, clock: str) -> Iterator[Any]:
    """Draw a Gantt chart. matplotlib has the settings to save it until the context ends."""
    # Imported here because matplotlib is slow to import and training runs never draw.
    import matplotlib
    from matplotlib.figure import Figure

    spans = _SPANS[clock](schedule, times)
    step_time = CLOCKS[clock](schedule, times)
    with matplotlib.rc_context():
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "taibai"})
        matplotlib.rcParams.update({"font.size": 8, "font.sans-serif": ["DejaVu Sans"]})
        height = 0.36 * schedule.num_stages + 0.16 * schedule.num_chunks + 0.8
        figure = Figure(figsize=(10, height), layout="constrained")
        axes = figure.add_subplot()
        _draw_boxes(axes, schedule, spans, step_time)
        axes.set_xlim(0, step_time)
        axes.set_ylim(schedule.num_stages - 0.5, -0.5)
        stages = range(schedule.num_stages)
        axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
        axes.tick_params(left=False)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_xlabel(f"time ({clock} clock)")
        kinds = {span.op.kind for span in spans}
        figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False)
        yield figure


def _draw_boxes(axes, schedule: Schedule, spans: list[Span], step_time: float) -> None:
    """Draw a box per operation; one path per kind and chunk keeps the files small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    for kind, (name, colour) in _COLOURS.items():
        for chunk in range(schedule.num_chunks):
            chunk_spans = [s for s in spans if s.op.kind == kind and s.op.chunk == chunk]
            if not chunk_spans:
                continue
            fill = _lighten(colour, chunk, schedule.num_chunks)
            label = name if schedule.num_chunks == 1 else f"{name}, chunk {chunk}"
            outline = Outline.make_compound_path(
                *(Outline(_corners(s), closed=True) for s in chunk_spans)
            )
            axes.add_patch(
                PathPatch(outline, facecolor=fill, edgecolor="white", lw=0.5, label=label)
            )
            dark = sum(fill) < 1.5
            for span in chunk_spans:
                # Shrink the font until the number fits: a digit takes about 0.008 of the width.
                share = (span.end - span.start) / step_time
                size = min(7.0, 700 * share / max(1.4, len(str(span.op.microbatch))))
                axes.text(
                    (span.start + span.end) / 2,
                    span.stage,
                    str(span.op.microbatch),
                    size=round(size, 1),
                    ha="center",
                    va="center_baseline",
                    color="white" if dark else "black",
                )


def _corners(span: Span) -> list[tuple[float, float]]:
    top = span.stage - _BOX_HEIGHT / 2
    bottom = span.stage + _BOX_HEIGHT / 2
    start = span.start
    end = span.end
    return [(start, top), (end, top), (end, bottom), (start, bottom), (start, top)]


def _lighten(colour: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    mix = _LIGHTEST * chunk / max(1, num_chunks - 1)
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * mix, green + (1 - green) * mix, blue + (1 - blue) * mix


def _shorten(svg: str) -> str:
    """Halve the size of an SVG: two decimals, no rotations by zero, no comments."""
    for pattern, replacement in (
        (r"(\.\d\d)\d+", r"\1"),
        (r' transform="rotate\(-0 [^"]*\)"', ""),
        (r" *<!--.*-->\n", ""),
        (r" +$", ""),
    ):
        svg = re.sub(pattern, replacement, svg, flags=re.MULTILINE)
    return svg


def _op_text(op: Op, num_chunks: int) -> str:
    if num_chunks == 1:
        return f"{op.kind}{op.microbatch}"
    letters = "abcdefghijklmnopqrstuvwxyz"
    chunk = letters[op.chunk] if num_chunks <= len(letters) else f".{op.chunk}"
    return f"{op.kind}{op.microbatch}{chunk}"
