"""Plots the training and evaluation loss of one or more runs over steps, and the plans of a run.

python -m train.plot runs/a [runs/b ...] --out=loss.png [--title="..."]
python -m train.plot runs/a --experts --out=load.png           the load of a run's experts
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from fields.paths import local_path
from train.reporting.metrics import METRICS_FILE, read_metrics
from untrusted.commands import command_parser, refuses_bad_input, run_command
from untrusted.outputs import check_file

#: How many meshes a plot of plans shows.
_MAX_MESHES = 40


def plot_losses(directories: list[Path], out: Path, title: str = "") -> None:
    """Plot `loss` (solid line) and `eval_loss` (dashed, with dots) of runs.

    Raises:
        ValueError: a run has no metrics, or `out` cannot be written as an image.
    """
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, directory in enumerate(directories):
        # The first line is the widest, so that curves that coincide are all visible.
        width = 1.2 + 2.4 * (len(directories) - 1 - index)
        entries = _read(directory)
        name = directory.name or str(directory)
        for key, style in (("loss", "-"), ("eval_loss", "o--")):
            points = [(entry["step"], entry[key]) for entry in entries if key in entry]
            if points:
                label = f"{name}: {key}" if len(directories) > 1 else key
                dark = key == "eval_loss" and len(directories) == 1
                look = {"color": "black" if dark else f"C{index}", "ms": 2 + width, "lw": width}
                axes.plot(*zip(*points, strict=True), style, label=label, **look)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save(figure, out)


def plot_experts(directory: Path, out: Path, title: str = "") -> None:
    """Plot the load of the least and most chosen expert of a run, and the entropy of its routers.

    Raises:
        ValueError: the run has no experts, or `out` cannot be written as an image.
    """
    entries = [entry for entry in _read(directory) if "expert_load_max" in entry]
    if not entries:
        raise ValueError(f"{directory} has no loads of experts; give a run with model.num_experts")
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    of_load, of_entropy = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    steps = [entry["step"] for entry in entries]
    for key, color in (("expert_load_max", "#d55e00"), ("expert_load_min", "#0072b2")):
        of_load.plot(steps, [entry[key] for entry in entries], color=color, label=key)
    of_load.axhline(1, color="gray", lw=0.8, ls="--")
    of_load.set(ylabel="load (1 is the mean)", title=title)
    of_load.legend(frameon=False)
    of_entropy.plot(steps, [entry["router_entropy"] for entry in entries], color="#009e73")
    of_entropy.set(xlabel="step", ylabel="entropy (nats)")
    for axes in (of_load, of_entropy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    save(figure, out)


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


def _read(directory: Path) -> list[dict]:
    path = directory / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the workdir of a run that logged a step")
    entries = read_metrics(path)
    if not any("loss" in entry or "eval_loss" in entry for entry in entries):
        raise ValueError(f"{path} contains no loss; give the workdir of a run that logged a step")
    return entries


@refuses_bad_input()
def main(argv: list[str] | None = None) -> None:
    """Run the command; return the exit code, which is 2 if a run cannot be plotted."""
    parser = command_parser("train.plot", description=__doc__)
    parser.add_argument(
        "rundirs", nargs="+", type=local_path, help="workdirs, with a metrics.jsonl"
    )
    parser.add_argument(
        "--out", type=local_path, default=Path("loss.png"), help="image file to write"
    )
    parser.add_argument("--title", default="")
    parser.add_argument(
        "--experts", action="store_true", help="plot the load of a run's experts instead"
    )
    args = parser.parse_args(argv)
    if args.experts and len(args.rundirs) > 1:
        raise ValueError(f"--experts plots one run, not {len(args.rundirs)}; give one workdir")
    if args.experts:
        plot_experts(args.rundirs[0], args.out, args.title)
    else:
        plot_losses(args.rundirs, args.out, args.title)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_command(main)
