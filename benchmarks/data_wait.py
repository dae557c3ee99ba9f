"""Measures how long training waits for images: `python -m benchmarks.data_wait --out=FILE`.

The benchmark trains `configs/vit.py` on handwritten digits, and one of its published sizes on JPEG
files as large as ImageNet's, with several numbers of worker processes. It starts `train.main` as a
user would, and reads `data_wait_s` and `step_time_s` from the run's metrics.jsonl. On a CPU, steps
and reading share the cores; with an accelerator, steps leave the cores to the reading.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.images import write_images
from fields.paths import local_path
from train.reporting.metrics import METRICS_FILE, read_metrics
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

ROOT = Path(__file__).parents[1]
# The first steps use batches that were read while the step was compiled.
_WARM_UP_STEPS = 10
_NEVER = ("eval.every_steps=0", "checkpoint.every_steps=0", "log.every_steps=1")


@refuses_bad_input(subprocess.CalledProcessError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.data_wait")
    parser.add_argument(
        "--workers", default="0,1,2", help="numbers of worker processes, separated by commas"
    )
    parser.add_argument("--files", type=int, default=500, help="number of JPEG files to write")
    parser.add_argument(
        "--size", default="tiny16", help="size of configs/vit.py for the JPEG files"
    )
    parser.add_argument("--batch", type=int, default=16, help="JPEG images per step")
    parser.add_argument("--steps", type=int, default=30, help="steps on JPEG files")
    parser.add_argument("--digits_steps", type=int, default=300, help="steps on digits")
    parser.add_argument("--note", help="remark to store, such as other load of the machine")
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    args = parser.parse_args(argv)
    workers = [int(number) for number in args.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="taibai_wait_") as directory:
        rows, file_bytes = measure(Path(directory), workers, args)
    figures = {
        "command": command_line("benchmarks.data_wait", argv),
        "versions": report.versions("pillow", "grain"),
        "hardware": {"cpu": report.cpu_name(), "num_cores": report.num_cores()},
        "note": args.note,
        "mean_file_bytes": file_bytes,
        "runs": rows,
    }
    print(as_text(rows))
    report.write_json(args.out, figures)
    return 0


def measure(
    directory: Path, workers: list[int], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Train on digits and, with every number of worker processes, on JPEG files.

    Args:
        directory: existing directory for images, caches and runs.
        workers: numbers of worker processes.
        args: arguments of the command line.

    Returns:
        The figures of every run, and the mean size of the JPEG files in bytes.
    """
    file_bytes = write_images(directory / "images", args.files) / args.files
    digits = (f"train.num_steps={args.digits_steps}",)
    rows = [_run(directory, "digits, 8 × 8", "configs/vit.py", digits, 0)]
    for number in workers:
        overrides = (
            "data.name=image_folder",
            f"data.paths={directory / 'images'}",
            f"data.global_batch_size={args.batch}",
            f"train.num_steps={args.steps}",
            "precision.compute=float32",
        )
        config = f"configs/vit.py:{args.size}"
        rows.append(_run(directory, "JPEG, 224 × 224", config, overrides, number))
    return rows, file_bytes


def _run(
    directory: Path, name: str, config: str, overrides: tuple[str, ...], num_workers: int
) -> dict[str, Any]:
    """Train once and return how long its steps waited for data."""
    workdir = Path(tempfile.mkdtemp(dir=directory))
    cache = f"data.cache_dir={directory / 'cache'}"
    workers = f"images.num_workers={num_workers}"
    flags = [f"--config.{override}" for override in (*_NEVER, cache, workers, *overrides)]
    command = [sys.executable, "-m", "train.main", f"--config={config}", f"--workdir={workdir}"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    steps = [entry for entry in read_metrics(workdir / METRICS_FILE) if "loss" in entry]
    steps = steps[_WARM_UP_STEPS:]
    step_s, wait_s = ([step[key] for step in steps] for key in ("step_time_s", "data_wait_s"))
    return {
        "data": name,
        "config": config,
        "num_workers": num_workers,
        "num_steps": len(steps),
        "images_per_s": statistics.median(step["images_per_s"] for step in steps),
        "step_time_s": statistics.median(step_s),
        "data_wait_s": statistics.median(wait_s),
        "longest_data_wait_s": max(wait_s),
        "waiting_fraction": sum(wait_s) / sum(step_s),
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return the figures as a readable text."""
    lines = [
        f"{'data':17}{'workers':>8}{'img/s':>8}{'step ms':>9}{'wait ms':>9}{'most':>7}{'share':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row['data']:17}{row['num_workers']:>8}{row['images_per_s']:>8,.0f}"
            f"{row['step_time_s'] * 1e3:>9,.1f}{row['data_wait_s'] * 1e3:>9.2f}"
            f"{row['longest_data_wait_s'] * 1e3:>7.0f}{row['waiting_fraction']:>8.2%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    run_command(main)
