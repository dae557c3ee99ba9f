"""Draws the losses of runs, one panel for each: the picture of docs/models.md.

    python -m docs.draw_models runs/gpt2 runs/opt runs/llama runs/t5 runs/bert runs/roberta

This writes docs/models.svg. A run's panel is named after its directory. All panels have the same
scale of losses, and each has its own scale of steps:

    9 ┤ llama                    the plot area of a panel is _PLOT_WIDTH × _PLOT_HEIGHT pixels;
      │ ╲_ training              _Panel.x and _Panel.y map steps and losses to pixels
    3 ┤   ╲____ validation 3.83
      └─────────
      0         300
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.reporting.metrics import METRICS_FILE, read_metrics

PICTURE = Path(__file__).parent / "models.svg"
_COLUMNS = 2
_PLOT_WIDTH = 280
_PLOT_HEIGHT = 150
_LEFT = 56  # room for the labels of losses
_ABOVE = 34  # room for the name of a panel
_GAP = 34  # between the plots of a row
_BELOW = 26  # room for the labels of steps
_FOOTER = 24
_LETTER = 7.5  # width of a letter of the labels
_STYLE = """
svg { background: white; font: 14px sans-serif; }
path { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.grid { stroke: #ddd; stroke-width: 1; }
.name { font-weight: bold; }
.axis { fill: #555; }
.training { stroke: #8fb0d8; }
.validation { stroke: #b34700; stroke-width: 2; }
text.training, text.validation { stroke: none; }
text.training { fill: #35639b; }
text.validation { fill: #b34700; }
"""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The losses of a run.

    Attributes:
        name: name of the run's directory.
        training: (step, loss) of every logged step.
        validation: (step, loss) of every evaluation; may be empty.
    """

    name: str
    training: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]


def read_curves(workdir: Path) -> Curves:
    """Read the losses of a run.

    Raises:
        ValueError: the directory has no logged loss.
    """
    file = workdir / METRICS_FILE
    entries = read_metrics(file) if file.exists() else []
    training, validation = (
        tuple((entry["step"], entry[key]) for entry in entries if entry.get(key) is not None)
        for key in ("loss", "eval_loss")
    )
    if not training:
        raise ValueError(f"{file} has no loss; name the directory of a run that has trained")
    return Curves(name=workdir.resolve().name, training=training, validation=validation)


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """The place of a plot, and the ranges of its axes."""

    left: int
    top: int
    last_step: int
    losses: tuple[int, int]

    def x(self, step: float) -> float:
        return self.left + _PLOT_WIDTH * step / self.last_step

    def y(self, loss: float) -> float:
        lowest, highest = self.losses
        return self.top + _PLOT_HEIGHT * (highest - loss) / (highest - lowest)


def draw(runs: Sequence[Curves]) -> str:
    """Return the picture as SVG."""
    losses = [loss for run in runs for _, loss in (*run.training, *run.validation)]
    limits = (math.floor(min(losses)), math.ceil(max(losses)))
    row_height = _ABOVE + _PLOT_HEIGHT + _BELOW
    width = _LEFT + _COLUMNS * (_PLOT_WIDTH + _GAP)
    height = math.ceil(len(runs) / _COLUMNS) * row_height + _FOOTER
    parts = []
    for number, run in enumerate(runs):
        row, column = divmod(number, _COLUMNS)
        panel = _Panel(
            left=_LEFT + column * (_PLOT_WIDTH + _GAP),
            top=row * row_height + _ABOVE,
            last_step=run.training[-1][0],
            losses=limits,
        )
        parts += [*_axes(panel, run.name, has_losses=column == 0), *_curves(panel, run)]
    footer = "Loss in nats, over the steps of each run"
    parts.append(_text(_LEFT, height - 8, footer, "axis"))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    title = "<title>Training and validation losses of the default configs</title>"
    return "\n".join([head, title, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def _axes(panel: _Panel, name: str, *, has_losses: bool) -> Iterator[str]:
    """Yield the name of a panel, a line for each whole loss, and the first and last step."""
    for loss in range(panel.losses[0], panel.losses[1] + 1):
        yield f'<path d="M{panel.left} {panel.y(loss):.0f}h{_PLOT_WIDTH}" class="grid"/>'
        if has_losses:
            yield _text(panel.left - 8, panel.y(loss) + 5, str(loss), "axis", "end")
    yield _text(panel.left, panel.top - 12, name, "name")
    below = panel.top + _PLOT_HEIGHT + 17
    yield _text(panel.left, below, "0", "axis")
    yield _text(panel.left + _PLOT_WIDTH, below, f"{panel.last_step:,}", "axis", "end")


def _curves(panel: _Panel, run: Curves) -> Iterator[str]:
    """Yield the curves of a run, each with a label next to it."""
    both = (*run.training, *run.validation)
    yield _path(panel, run.training, "training")
    start = panel.left + _PLOT_WIDTH * 0.3
    ys = _heights(panel, both, start, start + _LETTER * len("training"))
    yield _text(start, min(ys) - 6, "training", "training")
    if run.validation:
        yield _path(panel, run.validation, "validation")
        label = f"validation {run.validation[-1][1]:.2f}"
        end = panel.left + _PLOT_WIDTH
        ys = _heights(panel, both, end - _LETTER * len(label), end)
        yield _text(end, max(ys) + 17, label, "validation", "end")


def _heights(
    panel: _Panel, points: Sequence[tuple[int, float]], left: float, right: float
) -> list[float]:
    """Return the y of the points whose x is in a range."""
    return [panel.y(loss) for step, loss in points if left <= panel.x(step) <= right]


def _path(panel: _Panel, points: Sequence[tuple[int, float]], kind: str) -> str:
    line = "L".join(f"{panel.x(step):.1f} {panel.y(loss):.1f}" for step, loss in points)
    return f'<path d="M{line}" class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" class="{kind}">{text}</text>'


def main(argv: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser("docs.draw_models", description="Draws the losses of runs.")
    parser.add_argument("workdirs", nargs="+", type=Path, help="directories of runs")
    workdirs = parser.parse_args(argv).workdirs
    PICTURE.write_text(draw([read_curves(path) for path in workdirs]), encoding="utf-8")


if __name__ == "__main__":
    main()
