"""Evaluates the checkpoints of a run while it trains, each as soon as it is complete.

    run/checkpoints/100 ──> scores ──> a line of run/lm_eval.jsonl, points in TensorBoard

Another process does this, so the training does not wait, and the evaluation may use other devices.
The last checkpoint is the one of `train.num_steps`, in the run's `config.yaml`, unless early
stopping or a callback ends the run before it.
"""

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from checkpoint.checksums import CHECKSUMS_FILE, find_damage
from checkpoint.layout import CHECKPOINTS, STATE, steps_in
from checkpoint.run_copies import is_copy
from convert.runs import CONFIG_FILE
from untrusted.appender import JsonLines
from untrusted.documents import read_json, read_json_lines, read_yaml
from untrusted.files import check_links, check_tree, digest_of
from untrusted.schema import check_fields
from untrusted.tensorboard_file import TensorBoardFile


def add_follow(parser: argparse.ArgumentParser) -> None:
    """Add the option `--follow` to a parser."""
    parser.add_argument(
        "--follow",
        action="store_true",
        help="evaluate each checkpoint of a run that trains, and log the scores in the run",
    )


def check_follow(args: argparse.Namespace) -> None:
    """Check the arguments of a command that follows a run.

    Raises:
        ValueError: they have `--out`, or `--model` is not the directory of a run on this machine.
    """
    if args.out is not None:
        raise ValueError(
            f"--out={args.out} is for one evaluation; with --follow, the scores are written into "
            f"the run {args.model}"
        )
    if is_copy(args.model):
        raise ValueError(
            "--follow needs the directory of a run, but --model is in an object store; leave "
            "--follow out to evaluate its newest checkpoint"
        )
    _num_steps(args.model)


def follow(
    run: Path,
    name: str,
    settings: Mapping[str, Any],
    scores_of: Callable[[Path], Mapping[str, float]],
    *,
    poll_s: float = 5.0,
) -> None:
    """Evaluate the checkpoints of a run, oldest first, until the last one has been evaluated.

    The scores are appended to `run/<name>.jsonl`, a line for each checkpoint, and drawn by
    TensorBoard from `run/tensorboard/<name>`. A checkpoint that has a line with the same settings
    is not evaluated again.

    Args:
        settings: all inputs of the scores except the checkpoint, as values for JSON.

    Raises:
        ValueError: `run` is not the directory of a run, has a link that leads outside, or there
            are several processes; or `scores_of` raised it.
        OSError: a file cannot be read or written.
    """
    if jax.process_count() > 1:
        raise ValueError("--follow evaluates in one process; start it on one host")
    check_links(run)
    seen: set[tuple[str, str | None]] = set()
    print(f"following {run} to step {_num_steps(run):,}", flush=True)
    # Ctrl-C is how a user ends this, if the run does not.
    with (
        contextlib.closing(_Log(run, name, settings)) as log,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while True:
            num_steps = _num_steps(run)
            has_finished = _has_finished(run)  # before the checkpoints are listed
            for step in [run / CHECKPOINTS / str(step) for step in steps_in(run / CHECKPOINTS)]:
                checksum = _checksum_of(step)
                if (step.name, checksum) not in seen and not log.has(checksum):
                    _evaluate(step, checksum, log, scores_of)
                seen.add((step.name, checksum))
                if int(step.name) >= num_steps and step.exists():
                    return
            if has_finished:
                return
            time.sleep(poll_s)


def _evaluate(
    step: Path,
    checksum: str | None,
    log: "_Log",
    scores_of: Callable[[Path], Mapping[str, float]],
) -> None:
    """Evaluate a checkpoint and log its scores, unless it is damaged or has been deleted."""
    try:
        damage = find_damage(step)
        if damage is None and checksum is not None:
            # A model that is no longer used keeps its memory until its cycles are collected.
            gc.collect()
            log.append(int(step.name), checksum, scores_of(step))
    except (ValueError, OSError):
        if step.exists():
            raise
        damage = None
    if not step.exists():
        print(f"step {step.name}: the run has deleted this checkpoint", flush=True)
    elif damage is not None:
        print(f"step {step.name} is skipped: {damage}", flush=True)


class _Log:
    """The files of an evaluation in a run: `<name>.jsonl`, and `tensorboard/<name>/`.

    A line has the step, the SHA-256 of the checkpoint's checksums, the settings, and the scores.
    """

    def __init__(self, run: Path, name: str, settings: Mapping[str, Any]):
        self._path = run / f"{name}.jsonl"
        self._tensorboard = run / "tensorboard" / name
        self._files: tuple[JsonLines, TensorBoardFile] | None = None  # opened for the first scores
        self._settings = {**settings}
        lines = read_json_lines(self._path, within=run) if self._path.exists() else []
        self._checksums = {
            str(line.get("checksum")) for line in lines if line.get("settings") == self._settings
        }

    def has(self, checksum: str | None) -> bool:
        """Return whether a checkpoint has a line."""
        return checksum in self._checksums

    def append(self, step: int, checksum: str, scores: Mapping[str, float]) -> None:
        """Append a line and points, and print the scores."""
        if self._files is None:
            self._files = JsonLines(self._path), TensorBoardFile(self._tensorboard)
        lines, points = self._files
        lines.append(
            {"step": step, "checksum": checksum, "settings": self._settings, "scores": scores}
        )
        points.append(step, scores)
        shown = " ".join(f"{key} {value:.6g}" for key, value in scores.items())
        print(f"step {step} {shown}", flush=True)

    def close(self) -> None:
        """Close the files."""
        for file in self._files or ():
            file.close()


def _num_steps(run: Path) -> int:
    """Return the step with which a run ends."""
    file = run / CONFIG_FILE
    if not file.exists() or (run / STATE).exists():
        raise ValueError(
            f"--model={run} is not the directory of a run, which --follow needs; start the run "
            "first, and pass its --workdir"
        )
    config = read_yaml(file, within=run)
    if "train" not in config:
        raise ValueError(
            f"--model={run} is a converted model, not a run; evaluate it without --follow"
        )
    check_fields(config, {"train": dict[str, Any]}, file)
    check_fields(config["train"], {"num_steps": int}, f"{file}: train")
    return config["train"]["num_steps"]


def _has_finished(run: Path) -> bool:
    """Return whether the newest start of a run has ended it; see train/goodput.py."""
    records = sorted((run / "goodput").glob("*.json"), key=lambda path: (len(path.name), path.name))
    try:
        # A start with another config has written that config, but no record yet.
        if not records or records[-1].stat().st_mtime < (run / CONFIG_FILE).stat().st_mtime:
            return False
        return read_json(records[-1], within=run).get("ended") == "finished"
    except (OSError, ValueError):
        return False  # it is being replaced


def _checksum_of(step: Path) -> str | None:
    """Return the SHA-256 of a checkpoint's checksums; None if it has none, or is deleted."""
    try:
        check_tree(step, step.parent.parent)
        return digest_of(step / CHECKSUMS_FILE, within=step)
    except OSError:
        return None
