"""Measures how long it takes to save a checkpoint, and how long the training loop waits for it.

    python -m benchmarks.saves --config=configs/gpt2.py --rounds=8 --config.mesh.data=8

The state is initialized from the config and sharded as in training. Each round saves it once, with
the same steps as `train.loop`: arrays are converted to the layout of checkpoints and copied, and
threads write the files. Right after `save` returns, the round times an in-place update, which
reuses the memory of the saved arrays like a training step. Compared with an update while nothing is
being saved, it shows how much a save delays the loop after `save` has returned.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import report
from benchmarks.step import make_run
from checkpoint.config import CheckpointConfig
from checkpoint.manager import Checkpoints
from fields.paths import local_path
from train.config.overrides import Overrides
from train.run.run import Run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.saves")
    parser.add_argument("--config", required=True, help="file.py, file.py:argument or config.yaml")
    parser.add_argument("--rounds", type=int, default=8, help="number of saves")
    parser.add_argument(
        "--directory",
        type=local_path,
        help="directory on the file system to measure (default: /tmp)",
    )
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    args, others = parser.parse_known_args(argv)
    if args.rounds < 1:
        raise ValueError(f"--rounds={args.rounds} must be at least 1")
    run = make_run(args.config, Overrides.parse(others))
    scratch = Path(tempfile.mkdtemp(prefix="taibai_saves_", dir=args.directory))
    figures = measure(run, scratch, args.rounds)
    shutil.rmtree(scratch)
    figures = {"command": command_line("benchmarks.saves", argv)} | figures
    print(as_text(figures))
    report.write_json(args.out, figures)
    return 0


def measure(run: Run, directory: Path, num_rounds: int) -> dict[str, Any]:
    """Measure saves of a run's initial state.

    Args:
        directory: directory for the checkpoints.
        num_rounds: number of saves after the first, which is reported separately.

    Returns:
        All figures, as plain numbers and strings.
    """
    state = run.state_layout.initial()
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    checkpoints = Checkpoints(directory, CheckpointConfig(every_steps=1, max_to_keep=1))
    rounds = []
    for i in range(1 + num_rounds):
        state, undisturbed_s = _timed(update, state)
        state, alone_s = _timed(update, state)
        begin_s = time.monotonic()
        checkpoints.save(i, run.state_layout.to_portable(state), {})
        blocked_s = time.monotonic() - begin_s
        state, beside_s = _timed(update, state)
        checkpoints.wait()
        save_s = time.monotonic() - begin_s
        after_s = beside_s - min(undisturbed_s, alone_s)
        rounds.append({"save_s": save_s, "blocked_s": blocked_s, "update_longer_by_s": after_s})
    checkpoints.close()
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {
        "versions": report.versions(),
        "hardware": report.hardware(run.mesh),
        "mesh": {axis: size for axis, size in run.mesh.shape.items() if size > 1},
        "num_params": run.num_params,
        "bytes": num_bytes,
        "first": rounds[0],
        "median": {
            name: statistics.median(each[name] for each in rounds[1:]) for name in rounds[0]
        },
        "rounds": rounds[1:],
    }


def _timed(update: Any, state: Any) -> tuple[Any, float]:
    begin_s = time.monotonic()
    state = jax.block_until_ready(update(state))
    return state, time.monotonic() - begin_s


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as a readable text."""
    lines = [
        f"{figures['num_params']:,} parameters, {figures['bytes'] / 2**20:,.0f} MiB of state on "
        f"{figures['hardware']['num_devices']} {figures['hardware']['device_kind']} device(s)",
        f"{'':8}{'a save s':>10}{'the loop waits s':>18}{'of it':>8}{'next update longer s':>22}",
    ]
    for name in ("first", "median"):
        each = figures[name]
        lines.append(
            f"{name:8}{each['save_s']:>10.2f}{each['blocked_s']:>18.3f}"
            f"{each['blocked_s'] / each['save_s']:>8.1%}{each['update_longer_by_s']:>22.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
