"""Draws the plans of a search as a picture, and writes pictures to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from untrusted.outputs import check_file

#: How many meshes a plot of plans shows.
_MAX_MESHES = 40


def plot_plans(
    composed: Mapping[str, Sequence[tuple[float, bool]]], compiled: Mapping[str, float], out: Path
) -> None:
    """Plot the step times of all plans over their meshes, the fastest mesh first.

    Args:
        composed: mesh -> for each of its plans, its composed step time in seconds and whether it
            fits into memory.
        compiled: mesh -> predicted step time of its compiled plan, in seconds.

    Raises:
        ValueError: `out` cannot be written as an image.
    """

    def fastest(mesh: str) -> tuple[bool, float]:
        times = [seconds for seconds, fits in composed[mesh] if fits]
        return not times, min(times or [seconds for seconds, _ in composed[mesh]])

    meshes = sorted(composed, key=fastest)[:_MAX_MESHES]
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for fits, color, label in (
        (False, "#d9d9d9", "composed, does not fit into memory"),
        (True, "#0072b2", "composed, fits"),
    ):
        points = [
            (1e3 * seconds, row)
            for row, mesh in enumerate(meshes)
            for seconds, is_fitting in composed[mesh]
            if is_fitting == fits
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=9, color=color, label=label)
    rings = [(1e3 * compiled[mesh], row) for row, mesh in enumerate(meshes) if mesh in compiled]
    if rings:
        style = {"facecolors": "none", "edgecolors": "#d55e00", "label": "compiled"}
        axes.scatter(*zip(*rings, strict=True), s=70, **style)
    axes.set(xlabel="predicted step, ms", xscale="log", yticks=range(len(meshes)))
    axes.set_yticklabels(meshes, fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False)
    save(figure, out)


def check_picture(option: str, path: Path | None) -> None:
    """Check that a picture can be written, before the work that it shows.

    Args:
        path: image file; None: nothing is written.

    Raises:
        ValueError: its directory does not exist, or its name ends with no known format.
    """
    check_file(option, path)
    formats = FigureCanvasBase.get_supported_filetypes()
    if path is not None and path.suffix.removeprefix(".").lower() not in formats:
        known = ", ".join(f".{name}" for name in sorted(formats))
        raise ValueError(f"{option}={path} must end with one of {known}")


def save(figure: Figure, out: Path) -> None:
    """Write a figure to a file.

    Raises:
        ValueError: `out` cannot be written as an image.
    """
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out={out} cannot be written: {error}") from error
