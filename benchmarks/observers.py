"""Measures what callbacks and trackers cost, compared with a training step.

    export WANDB_MODE=offline
    python -m benchmarks.observers --config=configs/gpt2.py --config.log.trackers=wandb

The benchmark logs many steps: a callback logs a value, and the trackers of `log.trackers` record
all values. It reports two costs of a logged step: the time of these calls in the loop, which delays
the next step, and the processor time of the whole process, which includes the trackers' threads. If
no core is free, steps are delayed by up to that time. The time of a step is measured separately.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.batches import random_batch
from benchmarks.harness.timing import time_s
from benchmarks.step import contender_of, make_run
from fields.paths import local_path
from train.config.config_files import flat_config
from train.config.overrides import Overrides
from train.lifecycle.callbacks import Callbacks, Event
from train.lifecycle.workdir import full_config
from train.reporting.trackers import Trackers, find_trackers
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

#: Seconds in which trackers start, and that pass between two logged steps.
_START_S = 10.0
_PAUSE_S = 0.01
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
    parser.add_argument("--steps", type=int, default=20, help="steps to time")
    parser.add_argument("--logged", type=int, default=500, help="logged steps")
    parser.add_argument("--note", help="remark to store, such as other load of the machine")
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    args, others = parser.parse_known_args(argv)
    run = make_run(args.config, Overrides.parse(others))
    with tempfile.TemporaryDirectory(prefix="taibai_observers_") as directory:
        figures = measure(run, Path(directory), num_steps=args.steps, num_logged=args.logged)
    figures = {"command": command_line("benchmarks.observers", argv), "note": args.note} | figures
    print(as_text(figures))
    report.write_json(args.out, figures)
    return 0


def measure(run: Run, directory: Path, *, num_steps: int, num_logged: int) -> dict[str, Any]:
    """Measure the costs of observers, and the time of a step.

    Args:
        directory: existing directory for the files of trackers.
        num_steps: number of steps to time.
        num_logged: number of logged steps to measure.

    Returns:
        All figures, as plain numbers and strings.
    """
    step = contender_of(run, random_batch(run)).step
    step_times_s = [time_s(step) for _ in range(num_steps)]
    names = run.config.log.trackers
    trackers = Trackers(find_trackers(names), directory, flat_config(full_config(run)), 0)
    callbacks = Callbacks(["benchmarks.observers:log_in_bits"], "train.step_callbacks", directory)

    def log(number: int) -> None:
        metrics = {name: 1 / number for name in _METRICS}
        trackers.log(number, metrics)
        trackers.log(number, callbacks.call(number, metrics).logged)

    log(1)
    time.sleep(_START_S)
    start_s = time.process_time()
    call_times_s = []
    for number in range(2, num_logged + 2):
        call_times_s.append(time_s(lambda number=number: log(number)))
        time.sleep(_PAUSE_S)  # so that the queues do not become full
    trackers.finish("finished")
    processor_time_s = (time.process_time() - start_s) / num_logged
    return {
        "versions": report.versions(*(_PACKAGES[name] for name in names)),
        "hardware": report.hardware(run.mesh),
        "trackers": list(names),
        "num_params": run.num_params,
        "step_time_s": statistics.median(step_times_s),
        "shortest_step_time_s": min(step_times_s),
        "call_time_s": statistics.median(call_times_s),
        "mean_call_time_s": statistics.mean(call_times_s),
        "processor_time_s": processor_time_s,
    }


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as a readable text."""
    shortest_s = figures["shortest_step_time_s"]
    calls_s = figures["call_time_s"]
    processor_s = figures["processor_time_s"]
    return (
        f"a step takes {1e3 * figures['step_time_s']:.1f} ms (at least {1e3 * shortest_s:.1f}); a "
        f"callback and {', '.join(figures['trackers']) or 'no tracker'} take the loop "
        f"{1e6 * calls_s:.0f} μs per logged step ({calls_s / shortest_s:.3%}), and the processor "
        f"{1e3 * processor_s:.2f} ms ({processor_s / shortest_s:.2%})"
    )


if __name__ == "__main__":
    run_command(main)
