"""Lists, verifies and shows the checkpoints of a run, without changing them.

    python -m checkpoint ls WORKDIR
    python -m checkpoint verify WORKDIR [--step=N]
    python -m checkpoint show WORKDIR [--step=N]

WORKDIR is the directory of a run, or its `checkpoints/`. docs/checkpoints.md explains the output.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoint.arrays import open_arrays
from checkpoint.checksums import CHECKSUMS_FILE, find_damage, find_missing
from checkpoint.errors import ReadError
from checkpoint.layout import (
    DAMAGED_SUFFIX,
    DIVERGED_SUFFIX,
    TMP_SUFFIX,
    best_steps,
    read_data_state,
    read_metrics,
    steps_in,
)
from checkpoint.paths import check_path
from checkpoint.run_copies import whole_run_path
from untrusted.commands import command_parser, refuses_bad_input, run_command
from untrusted.messages import shortened


def find_directory(workdir: Path) -> Path:
    """Return the directory that contains a run's checkpoints.

    Args:
        workdir: directory of a run, or its `checkpoints/`.

    Raises:
        ValueError: there are no checkpoints.
    """
    for directory in (workdir / "checkpoints", workdir):
        if steps_in(directory):
            return directory
    raise ValueError(
        f"{workdir} contains no checkpoint; pass the directory of a run or its checkpoints/"
    )


def ls(directory: Path, best_metric: str, best_is_max: bool) -> int:
    """Print a table of the checkpoints."""
    steps = steps_in(directory)
    metrics = {step: read_metrics(directory / str(step)) for step in steps}
    scores = {step: metrics[step].get(best_metric) for step in steps}
    best = best_steps(scores, num_best=1, best_is_max=best_is_max)
    rows = [("step", "size", "saved", "", "metrics")]
    for step in steps:
        path = directory / str(step)
        gap = find_missing(path)
        marks = ["newest"] * (step == steps[-1]) + ["best"] * (step in best)
        marks += [] if gap is None else [f"incomplete: {gap}"]
        values = "  ".join(f"{name} {value:.5g}" for name, value in metrics[step].items())
        with contextlib.suppress(FileNotFoundError):  # deleted just now by a running training
            rows.append((str(step), _size(path), _saved_at(path), ", ".join(marks), values))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for step, size, *other_cells in rows:
        cells = [step.rjust(widths[0]), size.rjust(widths[1])]
        cells += [cell.ljust(width) for cell, width in zip(other_cells, widths[2:], strict=True)]
        print("  ".join(cells).rstrip())
    for path in sorted(directory.glob(f"*{TMP_SUFFIX}*")):
        print(f"{path.name} is being written, or was left behind by a process that was killed")
    for suffix, reason in ((DAMAGED_SUFFIX, "damaged"), (DIVERGED_SUFFIX, "not finite")):
        for path in sorted(directory.glob(f"*{suffix}*")):
            print(f"{path.name} was found {reason} and set aside; delete it to free its space")
    return 0


def verify(directory: Path, step: int | None) -> int:
    """Check that checkpoints can be restored, and print one line per checkpoint.

    This compares their files with the checksums, and opens all arrays.

    Args:
        step: checkpoint to verify; None verifies all of them.

    Returns:
        The exit code: 0, or 1 if a checkpoint is damaged.
    """
    steps = steps_in(directory) if step is None else [_chosen_step(directory, step)]
    code = 0
    for number in steps:
        path = directory / str(number)
        damage = find_damage(path)
        if not path.exists():
            print(f"step {number}: deleted while it was read", flush=True)
            continue
        num_files = sum(file.is_file() for file in path.rglob("*"))
        intact = f"intact, {num_files} files, {_size(path)}"
        print(f"step {number}: {intact if damage is None else f'damaged: {damage}'}", flush=True)
        code = code if damage is None else 1
    return code


def show(directory: Path, step: int | None) -> int:
    """Print the names, shapes and sizes of a checkpoint's arrays, and its position in the data.

    Args:
        step: checkpoint to show; None shows the newest.

    Raises:
        ValueError: the checkpoint cannot be read.
    """
    number = _chosen_step(directory, step)
    path = directory / str(number)
    try:
        check_path(path)
        arrays = open_arrays(path)
        data_state = read_data_state(path)
    except ReadError:
        raise
    except (OSError, ValueError) as error:
        reason = shortened(error)
        raise ValueError(
            f"step {number} cannot be read ({reason}); run `verify` to find the damaged file"
        ) from error
    width = max((len(name) for name in arrays), default=0)
    total_bytes = 0
    for name, array in arrays.items():
        num_bytes = array.size * array.dtype.numpy_dtype.itemsize
        total_bytes += num_bytes
        shape = f"{array.dtype.name}{list(array.shape)}"
        print(f"{name:<{width}}  {shape:<28}  {num_bytes:>15,} bytes".rstrip())
    num_params = sum(array.size for array in arrays.values())
    print(f"{len(arrays)} arrays, {num_params:,} numbers, {_format_bytes(total_bytes)}")
    print(f"data_state: {json.dumps(data_state)}")
    return 0


def _chosen_step(directory: Path, step: int | None) -> int:
    steps = steps_in(directory)
    if step is not None and step not in steps:
        choices = ", ".join(map(str, steps))
        raise ValueError(
            f"--step={step} is not a checkpoint in {directory}; choose one of {choices}"
        )
    return steps[-1] if step is None else step


def _size(path: Path) -> str:
    return _format_bytes(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def _format_bytes(num_bytes: int) -> str:
    power = min(int(math.log2(max(num_bytes, 1)) // 10), 4)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {unit}"


def _saved_at(path: Path) -> str:
    """Return the time when a checkpoint was completed, which is when its checksums were written."""
    last = path / CHECKSUMS_FILE
    saved = time.localtime((last if last.exists() else path).stat().st_mtime)
    return time.strftime("%Y-%m-%d %H:%M:%S", saved)


@refuses_bad_input()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: command and its arguments; None takes them from `sys.argv`.

    Returns:
        The exit code: 0, 1 if `verify` found damage, or 2 after an error.
    """
    parser = command_parser("checkpoint")
    commands = parser.add_subparsers(required=True, metavar="ls|verify|show")

    def command(name: str, function: Callable[..., int], text: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        subparser.set_defaults(function=function)
        subparser.add_argument(
            "workdir", type=whole_run_path, help="directory of a run, or its checkpoints/"
        )
        return subparser

    ls_parser = command("ls", ls, "list the checkpoints")
    ls_parser.add_argument(
        "--best_metric",
        default="eval_loss",
        help="metric that decides which checkpoint is the best (default: eval_loss)",
    )
    ls_parser.add_argument(
        "--best_is_max", action="store_true", help="large values of the metric are good"
    )
    for name, function, text, default in (
        ("verify", verify, "compare every file with its checksum, and open every array", "all"),
        ("show", show, "list the arrays of a checkpoint", "the newest"),
    ):
        subparser = command(name, function, text)
        subparser.add_argument(
            "--step", type=int, default=None, help=f"step of the checkpoint (default: {default})"
        )
    options = vars(parser.parse_args(argv))
    function = options.pop("function")
    workdir = options.pop("workdir")
    return function(find_directory(workdir), **options)


if __name__ == "__main__":
    run_command(main)
