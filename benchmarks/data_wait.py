"""Measures how long training waits for images: `python -m benchmarks.data_wait --out=FILE`.

Trains `configs/vit.py` on the handwritten digits, and a published size of it on JPEG files as large
as ImageNet's with some numbers of worker processes, each as a user types it. What is read off are
`data_wait_s` and `step_time_s` of the run's metrics.jsonl. A CPU computes the steps and reads the
images with the same cores; beside an accelerator the steps leave them to the reading.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.images import write_images
from train.reporting.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
# The first steps live on what was read while the step was compiled.
_WARM_UP_STEPS = 10
_NEVER = ("eval.every_steps=0", "checkpoint.every_steps=0", "log.every_steps=1")


def main(argv: list[str] | None = None) -> int:
    """Prints the figures; returns the exit code: 0, or 2 after an error, said in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_wait", allow_abbrev=False)
    parser.add_argument("--workers", default="0,1,2", help="numbers of processes, with commas")
    parser.add_argument("--files", type=int, default=500, help="JPEG files that are written")
    parser.add_argument("--size", default="tiny16", help="of configs/vit.py, for these files")
    parser.add_argument("--batch", type=int, default=16, help="JPEG images a step")
    parser.add_argument("--steps", type=int, default=30, help="steps on JPEG files")
    parser.add_argument("--digits_steps", type=int, default=300, help="steps on digits")
    parser.add_argument("--note", help="what else the machine did, for example")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args(argv)
    try:
        workers = [int(number) for number in args.workers.split(",")]
        with tempfile.TemporaryDirectory(prefix="taibai_wait_") as directory:
            rows, file_bytes = measure(Path(directory), workers, args)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments = sys.argv[1:] if argv is None else argv
    figures = {
        "command": shlex.join(["python", "-m", "benchmarks.data_wait", *arguments]),
        "versions": report.versions("pillow", "grain"),
        "hardware": {"cpu": report.cpu_name(), "num_cores": report.num_cores()},
        "note": args.note,
        "mean_file_bytes": file_bytes,
        "runs": rows,
    }
    print(as_text(rows))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    return 0


def measure(
    directory: Path, workers: list[int], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Returns the figures of each run, and the mean bytes of the JPEG files it writes."""
    file_bytes = write_images(directory / "images", args.files) / args.files
    digits = (f"train.num_steps={args.digits_steps}",)
    rows = [_run(directory, "digits, 8 × 8", "configs/vit.py", digits, 0)]
    for number in workers:
        overrides = (
            *("data.name=image_folder", f"data.paths={directory / 'images'}"),
            *(f"data.global_batch_size={args.batch}", f"train.num_steps={args.steps}"),
            "precision.compute=float32",
        )
        config = f"configs/vit.py:{args.size}"
        rows.append(_run(directory, "JPEG, 224 × 224", config, overrides, number))
    return rows, file_bytes


def _run(
    directory: Path, name: str, config: str, overrides: tuple[str, ...], num_workers: int
) -> dict[str, Any]:
    """Returns what a run waited for data, per step."""
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
    """Returns the figures for a reader."""
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
    sys.exit(main())
