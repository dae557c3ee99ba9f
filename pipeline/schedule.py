"""Makes pipeline schedules, by name or from a CSV file, and shows them.

    python -m pipeline.schedule --schedule=1f1b --stages=4 --microbatches=8

prints the table, its bubbles, the number of activations in flight and the step time. `--picture`
draws the table and `--csv` writes it to a file. docs/pipelines.md explains which schedule to
choose.
"""

import argparse
from collections.abc import Callable

from fields.numbers import shown
from fields.paths import local_name, local_path
from pipeline.schedules.csv_table import read_csv, write_csv
from pipeline.schedules.drawing import draw_picture, draw_text
from pipeline.schedules.generators import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from pipeline.schedules.simulate import CLOCKS, OperationTimes, bubble_fraction
from pipeline.schedules.table import Schedule, check_size, max_in_flight, verify
from untrusted.commands import command_parser, refuses_bad_input, run_command

__all__ = ["SCHEDULES", "forward_only", "make_schedule"]

#: Training schedules that `pipeline.schedule` can name, called as
#: `make(num_stages, num_microbatches, num_chunks)`.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
}


def check_name(name_or_csv_path: str) -> None:
    """Check the value of `pipeline.schedule`.

    Raises:
        ValueError: it is neither a key of SCHEDULES nor the path of a CSV file.
    """
    if name_or_csv_path not in SCHEDULES and not name_or_csv_path.endswith(".csv"):
        raise ValueError(
            f"pipeline.schedule={name_or_csv_path!r} is unknown; choose from "
            f"{', '.join(SCHEDULES)}, or give the path of a CSV table (*.csv)"
        )


def make_schedule(
    name_or_csv_path: str, num_stages: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    """Return a verified training schedule.

    Args:
        name_or_csv_path: key of SCHEDULES, or the path of a table that ends in .csv.
        num_stages: number of stages, S.
        num_microbatches: number of microbatches, M.
        num_chunks: number of chunks of layers per stage, V.

    Raises:
        ValueError: the name is unknown, the schedule does not exist for these counts or its table
            would be too large, or the table in the file has other counts or breaks a rule.
    """
    counts = {"stages": num_stages, "microbatches": num_microbatches, "chunks": num_chunks}
    for count, value in counts.items():
        if value < 1:
            raise ValueError(f"{count}={value} must be at least 1")
    check_name(name_or_csv_path)
    if name_or_csv_path in SCHEDULES:
        check_size(
            f"pipeline.schedule={name_or_csv_path}", num_stages, num_microbatches, num_chunks
        )
        schedule = SCHEDULES[name_or_csv_path](num_stages, num_microbatches, num_chunks)
        verify(schedule)
        return schedule
    schedule = _read_training_table(name_or_csv_path)
    table_counts = {
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
    }
    for count, value in counts.items():
        if table_counts[count] != value:
            raise ValueError(
                f"{name_or_csv_path} is a table of {table_counts['stages']} stages, "
                f"{table_counts['microbatches']} microbatches and {table_counts['chunks']} chunks, "
                f"but the run has {value} {count}; set mesh.pipeline={table_counts['stages']}, "
                f"train.num_microbatches={table_counts['microbatches']} and "
                f"pipeline.chunks={table_counts['chunks']}"
            )
    return schedule


def _read_training_table(path: str) -> Schedule:
    schedule = read_csv(path)
    verify(schedule)
    if not schedule.has_backward():
        raise ValueError(f"{path} has no backward; add B, or I and W, for every microbatch")
    return schedule


@refuses_bad_input()
def main(argv: list[str] | None = None) -> None:
    """Print a pipeline schedule's table, bubbles, memory and step time; return the exit code."""
    args = _parser().parse_args(argv)
    times = _times(args)
    schedule = _schedule(args)
    print(draw_text(schedule))
    print(describe(schedule, times))
    if args.csv:
        write_csv(schedule, args.csv)
    if args.picture:
        draw_picture(schedule, times, args.clock, args.picture)


def describe(schedule: Schedule, times: OperationTimes) -> str:
    """Return a schedule's bubbles, step times and activations in flight as lines of text."""
    in_flight = max_in_flight(schedule)
    rows = [("clock", "bubble", "step time")]
    for name, clock in CLOCKS.items():
        fraction = bubble_fraction(schedule, times, clock=clock)
        rows.append((name, f"{fraction:.3f}", f"{clock(schedule, times):g}"))
    lines = [f"{name:<14}{bubble:<9}{time}" for name, bubble, time in rows]
    split = schedule.splits_backward()
    kinds = ("forward", "input_gradient", "weight_gradient") if split else ("forward",)
    costs = [f"{kind.replace('_', ' ')} {getattr(times, kind):g}" for kind in kinds]
    costs += [] if split else [f"backward {times.of('B'):g}"]
    lines.append(f"times of a whole stage: {', '.join(costs)}, send {times.send:g}")
    lines.append(f"most activations in flight, per stage, in chunks: {in_flight}")
    if schedule.num_chunks > 1:
        stages = ", ".join(f"{count / schedule.num_chunks:g}" for count in in_flight)
        lines.append(f"most activations in flight, per stage, in stages: [{stages}]")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "pipeline.schedule",
        description="Prints a pipeline schedule's table, bubbles, memory and step time.",
    )
    parser.add_argument(
        "--schedule",
        type=local_name,
        default="1f1b",
        help=f"{', '.join(SCHEDULES)}, or the path of a CSV table",
    )
    or_csv = ", or as in the CSV table"
    parser.add_argument("--stages", type=int, help=f"default 4{or_csv}")
    parser.add_argument("--microbatches", type=int, help=f"default 8{or_csv}")
    parser.add_argument("--chunks", type=int, help=f"chunks per stage, default 1{or_csv}")
    parser.add_argument("--forward", type=float, default=1.0, help="forward time of a whole stage")
    parser.add_argument("--backward", type=float, help="default: input plus weight gradient")
    parser.add_argument("--input-gradient", type=float, help="default: backward / 2, or 1")
    parser.add_argument("--weight-gradient", type=float, help="default: backward / 2, or 1")
    parser.add_argument("--send", type=float, default=0.0, help="time of a send between stages")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="synchronous", help="clock of the picture"
    )
    parser.add_argument(
        "--picture", type=local_path, help="draw the schedule to this file: out.svg or out.png"
    )
    parser.add_argument("--csv", type=local_path, help="write the table to this file")
    return parser


def _times(args: argparse.Namespace) -> OperationTimes:
    """Return the times from the command line; a lone --backward is halved for split backwards."""
    half = 1.0 if args.backward is None else args.backward / 2
    return OperationTimes(
        forward=args.forward,
        backward=args.backward,
        input_gradient=half if args.input_gradient is None else args.input_gradient,
        weight_gradient=half if args.weight_gradient is None else args.weight_gradient,
        send=args.send,
    )


def _schedule(args: argparse.Namespace) -> Schedule:
    counts = {"stages": 4, "microbatches": 8, "chunks": 1}
    if args.schedule.endswith(".csv"):
        table = _read_training_table(args.schedule)
        counts = {name: getattr(table, f"num_{name}") for name in counts}
    options = {name: getattr(args, name) for name in counts}
    asked = {name: counts[name] if options[name] is None else options[name] for name in counts}
    for name, value in asked.items():
        if value < 1:
            raise ValueError(f"--{name}={shown(value)} must be at least 1")
    return make_schedule(args.schedule, asked["stages"], asked["microbatches"], asked["chunks"])


if __name__ == "__main__":
    run_command(main)
