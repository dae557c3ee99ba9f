"""Measures the accuracy of vision models on handwritten digits: `python -m benchmarks.digits`.

An experiment is a sequence of one or more runs of `python -m train.main`, each initialized from the
previous run. It is repeated for every seed. Its result is the accuracy on all held-out digits after
the last step of the last run, not at the best step. Experiments with fewer labels use the same
labelled images for every seed.
"""

import dataclasses
import functools
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import docs_page, report
from fields.paths import local_path
from train.reporting.metrics import METRICS_FILE, read_metrics
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Training:
    """One run: a config and its overrides."""

    config: str
    overrides: tuple[str, ...] = ()


_TENTH = "images.train_fraction=0.1"
_MIXUP = "images.mixup=0.8"
_MAE = Training("mae")
_MOCO = Training("moco")
#: Name of an experiment -> its runs, in order.
EXPERIMENTS = {
    "ViT": (Training("vit"),),
    "Swin": (Training("swin"),),
    "ResMLP": (Training("resmlp"),),
    "ViT from scratch, 10 % of the labels": (Training("vit_finetune", (_TENTH,)),),
    "MAE, then fine-tuning, 10 % of the labels": (_MAE, Training("vit_finetune", (_TENTH,))),
    "ViT from scratch, 10 % of the labels, Mixup": (Training("vit_finetune", (_TENTH, _MIXUP)),),
    "MAE, then fine-tuning, 10 % of the labels, Mixup": (
        _MAE,
        Training("vit_finetune", (_TENTH, _MIXUP)),
    ),
    "untrained encoder, linear probe, 5 % of the labels": (Training("vit_probe"),),
    "MoCo v3, linear probe, 5 % of the labels": (_MOCO, Training("vit_probe")),
}


@refuses_bad_input(RuntimeError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.digits")
    parser.add_argument(
        "--only",
        action="append",
        help="run only experiments whose names contain this; can be repeated",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, counted from 0")
    parser.add_argument("--workdir", type=local_path, help="keep the runs in this new directory")
    parser.add_argument(
        "--out",
        type=local_path,
        help="JSON file to update; it keeps the figures of other experiments",
    )
    args = parser.parse_args(argv)
    wanted = [
        name
        for name in EXPERIMENTS
        if args.only is None or any(part.lower() in name.lower() for part in args.only)
    ]
    if not wanted:
        raise ValueError(
            f"--only={args.only} matches nothing; choose from {'; '.join(EXPERIMENTS)}"
        )
    if args.seeds < 1:
        raise ValueError(f"--seeds={args.seeds} must be at least 1")
    try:  # find errors now, not after hours of training
        before = report.read_json(args.out) if args.out and args.out.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"--out={args.out} cannot be read as JSON: {error}") from error
    circumstances = {
        "command": command_line("benchmarks.digits", argv),
        "versions": report.versions(),
        "hardware": {"cpu": report.cpu_name(), "num_cores": report.num_cores()},
    }
    with tempfile.TemporaryDirectory(prefix="taibai_digits_") as temporary:
        directory = args.workdir or Path(temporary)
        results = {
            name: {**circumstances, **experiment(name, args.seeds, directory)} for name in wanted
        }
    print(as_text(results))
    all_results = {**before, **results}
    ordered = {name: all_results[name] for name in EXPERIMENTS if name in all_results}
    report.write_json(args.out, ordered)
    return 0


def experiment(name: str, num_seeds: int, directory: Path) -> dict[str, Any]:
    """Run an experiment with every seed.

    Args:
        name: key of EXPERIMENTS.
        num_seeds: number of seeds, counted from 0.
        directory: directory for the working directories of the runs.

    Returns:
        The runs of the experiment, and the accuracy and seconds of every seed.
    """
    trainings = EXPERIMENTS[name]
    accuracies = []
    seconds = []
    for seed in range(num_seeds):
        workdir = None
        total = 0.0
        for training in trainings:
            workdir, taken = train(training, seed, directory, workdir)
            total += taken
        assert workdir is not None
        seconds.append(round(total, 1))
        scores = [line for line in read_metrics(workdir / METRICS_FILE) if "eval_accuracy" in line]
        accuracies.append(scores[-1]["eval_accuracy"])
        print(f"{name}, seed {seed}: {100 * accuracies[-1]:.1f} %, {seconds[-1]} s", flush=True)
    return {
        "runs": [dataclasses.asdict(training) for training in trainings],
        "accuracies": accuracies,
        "seconds": seconds,
    }


@functools.cache
def train(
    training: Training, seed: int, directory: Path, init_from: Path | None
) -> tuple[Path, float]:
    """Train one run to its end, or return it from the cache if it has been trained already.

    Args:
        training: config and overrides of the run.
        directory: parent of the run's working directory.
        init_from: working directory of the run to start from; None to start from scratch.

    Returns:
        The working directory of the run, and its duration in seconds.

    Raises:
        RuntimeError: the run failed.
    """
    start = time.perf_counter()
    before = "" if init_from is None else f"_from_{init_from.name}"
    words = [part.partition("=")[2] for part in training.overrides]
    workdir = directory / f"{'_'.join([training.config, *words])}_{seed}{before}"
    overrides = [*training.overrides, f"train.seed={seed}"]
    overrides += [] if init_from is None else [f"init_from={init_from}"]
    command = [
        sys.executable,
        "-m",
        "train.main",
        f"--config=configs/{training.config}.py",
        f"--workdir={workdir}",
        *(f"--config.{override}" for override in overrides),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{shlex.join(command)} failed with exit code {done.returncode}: {done.stderr}"
        )
    return workdir, time.perf_counter() - start


def as_text(results: dict[str, Any]) -> str:
    """Return the results of experiments as a Markdown table."""
    rows = [["experiment", "top-1 of seeds", "mean", "seconds"]]
    for name, result in results.items():
        percents = ", ".join(f"{100 * value:.1f}" for value in result["accuracies"])
        mean = 100 * statistics.mean(result["accuracies"])
        seconds = statistics.median(result["seconds"])
        rows.append([name, percents, f"{mean:.1f} %", f"{seconds:.0f}"])
    return docs_page.markdown(rows)


if __name__ == "__main__":
    run_command(main)
