"""Compares the step times of pipeline schedules with predictions: `python -m benchmarks.pipeline`.

    python -m benchmarks.pipeline --config=configs/gpt2.py --schedules=1f1b,zero_bubble --stages=4

In turns with the steps, the benchmark also times the operations that a schedule consists of: the
forward and backward pass of a stage's layers, the two halves of the backward pass, embedding, head
and optimizer update. Each part runs on one device *alone*, and on all stages *together*. From the
schedule's table and these times, it makes two predictions of the step time, without sends:

- *Synchronous*: a tick lasts as long as its slowest stage. Separate devices should reach this time.
- *Work-bound*: simulated devices share the cores, so an idle stage leaves its core to another one.
  A tick takes as long as its total work takes when all stages are busy, but at least as long as its
  slowest stage takes alone. If devices share nothing, this equals the synchronous time.

For example, with 2 stages on one core, a part takes 1 ms alone and 2 ms together:

    tick with one busy stage     synchronous 1 ms    work-bound max(1, 2 / 2) = 1 ms
    tick with two busy stages    synchronous 1 ms    work-bound max(1, (2 + 2) / 2) = 2 ms
"""

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks.harness import report
from benchmarks.harness.batches import random_batch
from benchmarks.harness.schedule_prediction import parts_of_op, parts_of_step, predict
from benchmarks.harness.stage_parts import StagePart, StageParts
from benchmarks.harness.timing import Contender, StepTimes, interleave, ratios
from benchmarks.step import contender_of, make_run
from distributed import startup
from pipeline.schedule import SCHEDULES
from pipeline.schedules.table import max_in_flight
from predict.program.flops import matmul_flops
from predict.program.memory import memory
from sharding.mesh import MeshConfig
from train.config import config_files
from train.config.old_keys import NEW_KEYS
from train.config.overrides import Overrides
from train.config.remat import Remat
from train.config.schema import checked_value
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

DEFAULT_STAGES = 4
#: Schedule -> number of chunks per stage. Schedules that are not listed have one.
CHUNKS = {"interleaved_1f1b": 2, "zbv": 2}
#: Every schedule runs with recomputed stages, and without.
RECOMPUTES = (True, False)
#: Config keys that this benchmark sets itself -> what to tell users who set them.
_SET_BY = {
    "pipeline.schedule": "use --schedules instead",
    "pipeline.chunks": "it follows from --schedules",
    "mesh.pipeline": "use --stages instead",
    "train.num_microbatches": "use --microbatches instead",
}

Tree = Any


@refuses_bad_input(ImportError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.pipeline")
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument(
        "--schedules", default=",".join(SCHEDULES), help="schedules, separated by commas"
    )
    parser.add_argument(
        "--stages", type=int, help="default: the number of accelerators, or 4 on a CPU"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--steps", type=int, default=1, help="timed steps of each contender per round"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds, in each of which all contenders take turns"
    )
    args, others = parser.parse_known_args(argv)
    if args.steps < 1 or args.rounds < 1:
        raise ValueError(f"--steps={args.steps} --rounds={args.rounds} must be at least 1")
    runs = make_runs(
        args.config,
        Overrides.parse(others),
        [name for name in args.schedules.split(",") if name],
        num_stages=_default_stages() if args.stages is None else args.stages,
        num_microbatches=args.microbatches,
    )
    figures = measure(runs, num_rounds=args.rounds, num_steps=args.steps)
    command = command_line("benchmarks.pipeline", argv)
    figures = {"command": command} | figures
    as_text = report.pipelines_as_text
    print(json.dumps(figures, allow_nan=False) if args.json else as_text(figures))
    return 0


def make_runs(
    config: str,
    overrides: Overrides | Sequence[str],
    schedules: Sequence[str],
    *,
    num_stages: int,
    num_microbatches: int,
) -> dict[tuple[str, str], Run]:
    """Return two runs per schedule, with and without recomputed stages, equal in everything else.

    Args:
        config: path of the config file, with or without an argument.
        overrides: parsed, or strings `section.key=value`, for keys that this benchmark does not
            set itself.
        schedules: keys of SCHEDULES.
        num_stages: number of pipeline stages, at least 2.
        num_microbatches: microbatches per step.

    Returns:
        (schedule, `train.remat`) -> run.

    Raises:
        ValueError: a setting is invalid, or this benchmark does not support it.
    """
    overrides = Overrides.of(overrides)
    for key in overrides.keys:
        if key in _SET_BY:
            raise ValueError(f"--config.{key} cannot be set here; {_SET_BY[key]}")
    if not schedules:
        raise ValueError(f"--schedules is empty; choose from {', '.join(SCHEDULES)}")
    if num_stages < 2:
        raise ValueError(
            f"--stages={num_stages} must be at least 2; without enough accelerators, set "
            "JAX_PLATFORMS=cpu to simulate devices on the CPU"
        )
    remat = Remat.parse(checked_value(config_files.load(config, overrides), "train.remat"))
    if remat.recomputes_stages and "train.remat" in overrides.keys:
        raise ValueError(
            f"--config.train.remat={remat} must not contain 'stage': every schedule runs with it "
            "and without it"
        )
    others = [o for o in overrides.command_line if NEW_KEYS.get(o.key, o.key) != "train.remat"]
    runs = {}
    for schedule in schedules:
        for recomputes in RECOMPUTES:
            value = str(dataclasses.replace(remat, recomputes_stages=recomputes))
            benchmark_settings = {
                "mesh.pipeline": num_stages,
                "train.num_microbatches": num_microbatches,
                "pipeline.schedule": schedule,
                "pipeline.chunks": CHUNKS.get(schedule, 1),
                "train.remat": value,
            }
            settings = Overrides.of([f"{key}={x}" for key, x in benchmark_settings.items()])
            all_overrides = (*others, *settings.command_line)
            runs[schedule, value] = run = make_run(config, Overrides(command_line=all_overrides))
            _check(run)
    return runs


def measure(
    runs: Mapping[tuple[str, str], Run], *, num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Measure the steps of the runs, and the parts that they consist of.

    Args:
        runs: result of `make_runs`.
        num_rounds: number of turns of each run and of each part.
        num_steps: number of timed steps in a turn.

    Returns:
        All figures, as plain numbers and strings.
    """
    some = next(iter(runs.values()))
    wanted = sorted({part for run in runs.values() for part in parts_of_step(run)})
    alone = StageParts(some, list(some.mesh.devices.flat[:1]))
    together = StageParts(some, list(some.mesh.devices.flat))
    batch = random_batch(some)
    states: dict[Any, Any] = {}
    contenders = {name: contender_of(run, batch, states) for name, run in runs.items()}
    parts = {(group, part): group.step_of(part) for group in (alone, together) for part in wanted}
    whole = {name: contender.step for name, contender in contenders.items()}
    times = interleave({**parts, **whole}, num_rounds=num_rounds, num_steps=num_steps)
    # Per round: (seconds of each part alone, seconds of each part together), for one microbatch.
    costs = [
        tuple(
            {part: times[group, part].round_medians_s[i] / group.repeats(part) for part in wanted}
            for group in (alone, together)
        )
        for i in range(num_rounds)
    ]
    flops = {part: alone.flops(part) for part in wanted}
    return {
        "versions": report.versions(),
        "hardware": report.hardware(some.mesh),
        "cores_are_shared": some.mesh.devices.flat[0].platform == "cpu",
        "work": {k: v for k, v in report.work(some).items() if k not in ("schedule", "remat")},
        "rounds": num_rounds,
        "steps_per_round": num_steps,
        "parts": [
            {
                "part": name,
                "layers": num_layers,
                "time_alone_s": statistics.median(cost[0][name, num_layers] for cost in costs),
                "time_together_s": statistics.median(cost[1][name, num_layers] for cost in costs),
                "matmul_flops": flops[name, num_layers],
            }
            for name, num_layers in wanted
        ],
        "runs": [
            {"schedule": schedule, "remat": remat}
            | _figures(run, times[schedule, remat], contenders[schedule, remat], costs, flops)
            for (schedule, remat), run in runs.items()
        ],
    }


def _figures(
    run: Run,
    times: StepTimes,
    contender: Contender,
    costs: Sequence[tuple[Mapping[StagePart, float], ...]],
    flops: Mapping[StagePart, float | None],
) -> dict[str, Any]:
    """Return the figures of one run.

    Every round has a prediction of its own, from the times of the parts in the same round, so a
    slow minute of the machine affects both sides of a comparison.
    """
    predictions = [predict(run, alone, together) for alone, together in costs]

    def predicted(name: str) -> StepTimes:
        return StepTimes(rounds=tuple((getattr(p, name),) for p in predictions))

    shared = run.mesh.devices.flat[0].platform == "cpu"
    work_s = predicted("work_s")
    lost = [
        1 - work / step
        for work, step in zip(work_s.round_medians_s, times.round_medians_s, strict=True)
    ]
    per_stage = [0.0] * run.schedule.num_stages
    for _, stage, cell in run.schedule.cells():
        for part in (part for op in cell for part in parts_of_op(run, op, stage)):
            per_stage[stage] += flops[part] or 0.0
    chunks = run.schedule.num_chunks
    return {
        "chunks": chunks,
        "step_time_s": times.summary(),
        "synchronous_time_s": predicted("synchronous_s").median_s,
        "work_bound_time_s": predicted("work_bound_s").median_s,
        # ratios(ours, peer) is peer's time ÷ our time: here, measured ÷ predicted step time.
        "measured_over_predicted": ratios(
            predicted("work_bound_s" if shared else "synchronous_s"), times
        ),
        "bubble_predicted": statistics.median(p.bubble for p in predictions),
        "bubble_measured": None if shared else statistics.median(lost),
        "lost": statistics.median(lost),
        "in_flight_per_stage": [count / chunks for count in max_in_flight(run.schedule)],
        "memory": dataclasses.asdict(memory(run.compile_train_step())),
        "matmul_flops_per_stage": per_stage,
        "matmul_flops_if_never_idle": matmul_flops(run.compile_train_step()),
        "compile_time_s": contender.compile_time_s,
        "first_loss": contender.first_loss,
    }


def _check(run: Run) -> None:
    """Raise a ValueError if the predictions do not cover a setting of the run."""
    others = {axis: n for axis, n in run.mesh.shape.items() if axis != "pipeline" and n > 1}
    for axis, size in others.items():
        raise ValueError(
            f"mesh.{axis}={size} is not supported: this benchmark splits models only over "
            f"pipeline; set mesh.{axis}=1"
        )
    if run.config.pipeline.share_vocab:
        raise ValueError(
            "pipeline.share_vocab=True is not supported: this benchmark assumes that embedding and "
            "head each run on one stage; set pipeline.share_vocab=False"
        )
    if len(run.functions.num_layers) > 1 or run.functions.before:
        raise ValueError(
            f"{type(run.model).__name__} has the stacks {', '.join(run.functions.num_layers)}; "
            "this benchmark supports only models with one stack and without before_<stack>"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"this run has {jax.process_count()} processes, but this benchmark needs a single one; "
            "start it without a launcher"
        )


def _default_stages() -> int:
    with contextlib.suppress(ValueError):  # too few accelerators; make_runs reports this
        startup.start(MeshConfig(pipeline=DEFAULT_STAGES))
    devices = jax.devices()
    return DEFAULT_STAGES if devices[0].platform == "cpu" else len(devices)


if __name__ == "__main__":
    run_command(main)
