"""Measures how much callbacks and trackers add to the time of a step.

    WANDB_MODE=offline python -m benchmarks.observers --config=configs/gpt2.py

Steps with and without them take turns in one run. Every observed step is logged, as with
`log.every_steps=1`: a callback logs a value, and the trackers of `log.trackers` record all values.
The benchmark also reports how long these calls take on the loop's thread.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.batches import random_batch
from benchmarks.harness.timing import interleave, ratios
from benchmarks.step import contender_of, make_run
from fields.paths import local_path
from train.config.config_files import flat_config
from train.config.overrides import Overrides
from train.lifecycle.callbacks import Callbacks, Event
from train.lifecycle.workdir import full_config
from train.reporting.trackers import Trackers, find_trackers
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

#: Tracker -> its package.
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
#: Names of the metrics that a run with text logs.
_METRICS = (
    "grad_norm",
    "learning_rate",
    "loss",
    "num_nonfinite_in_a_row",
    "num_skipped",
    "step_time_s",
    "data_wait_s",
    "tokens_per_s",
    "mfu",
)


def log_in_bits(event: Event) -> None:
    """Log the loss in bits: the callback that is measured."""
    event.log("loss_in_bits", event.metrics["loss"] / 0.693147)


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.observers")
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a turn")
    parser.add_argument("--note", help="remark to store, such as other load of the machine")
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    args, others = parser.parse_known_args(argv)
    run = make_run(args.config, Overrides.parse(others))
    with tempfile.TemporaryDirectory(prefix="taibai_observers_") as directory:
        figures = measure(run, Path(directory), num_rounds=args.rounds, num_steps=args.steps)
    figures = {"command": command_line("benchmarks.observers", argv), "note": args.note} | figures
    print(as_text(figures))
    report.write_json(args.out, figures)
    return 0


def measure(run: Run, directory: Path, *, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure steps with and without observers, in turns.

    Args:
        directory: existing directory for the files of trackers.

    Returns:
        All figures, as plain numbers and strings.
    """
    step = contender_of(run, random_batch(run)).step
    names = run.config.log.trackers
    trackers = Trackers(find_trackers(names), directory, flat_config(full_config(run)), 0)
    callbacks = Callbacks(["benchmarks.observers:log_in_bits"], "train.step_callbacks", directory)
    call_times_s = []

    def observed() -> None:
        loss = step()
        start_s = time.perf_counter()
        number = len(call_times_s) + 1
        metrics = {name: loss for name in _METRICS}
        trackers.log(number, metrics)
        trackers.log(number, callbacks.call(number, metrics).logged)
        call_times_s.append(time.perf_counter() - start_s)

    observed()  # trackers may import modules
    time.sleep(5)
    contenders = {"observed": observed, "plain": step}
    times = interleave(contenders, num_rounds=num_rounds, num_steps=num_steps)
    trackers.finish("finished")
    return {
        "versions": report.versions(*(_PACKAGES[name] for name in names)),
        "hardware": report.hardware(run.mesh),
        "trackers": list(names),
        "num_params": run.num_params,
        "step_time_s": {name: each.summary() for name, each in times.items()},
        "plain_over_observed": ratios(times["observed"], times["plain"]),
        "call_time_s": statistics.median(call_times_s),
        "longest_call_time_s": max(call_times_s),
    }


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as a readable text."""
    step_s = {name: each["median"] for name, each in figures["step_time_s"].items()}
    added = step_s["observed"] / step_s["plain"] - 1
    calls = figures["call_time_s"] / step_s["plain"]
    return (
        f"a step takes {1e3 * step_s['plain']:.1f} ms, with a callback and "
        f"{', '.join(figures['trackers']) or 'no tracker'} {1e3 * step_s['observed']:.1f} ms "
        f"({added:+.2%}); the calls take {1e6 * figures['call_time_s']:.0f} μs ({calls:.3%})"
    )


if __name__ == "__main__":
    run_command(main)
