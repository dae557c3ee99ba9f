"""Evaluates the checkpoints of a run while it trains, each as soon as it is complete.

    run/checkpoints/100 ──> scores ──> a line of run/lm_eval.jsonl, a point in TensorBoard

Another process does this, so the training does not wait, and the evaluation may use other devices.
The last checkpoint is the one of `train.num_steps`.
"""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from tensorboard.summary import Writer

from checkpoint.checksums import CHECKSUMS_FILE, find_damage
from checkpoint.layout import steps_in
from convert.runs import CHECKPOINTS, CONFIG_FILE, config_of
from untrusted.documents import parse_json, read_yaml
from untrusted.files import check_link, check_tree, digest_of, open_in_place, open_regular
from untrusted.schema import check_fields

#: Seconds between two looks for a new checkpoint.
POLL_S = 5.0


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
        ValueError: they have `--out`.
    """
    if args.out is not None:
        raise ValueError(
            f"--out={args.out} is for one evaluation; with --follow, the scores are written into "
            f"the run {args.model}"
        )


def follow(
    run: Path,
    name: str,
    scores_of: Callable[[Path], Mapping[str, float]],
    *,
    poll_s: float = POLL_S,
) -> None:
    """Evaluate the checkpoints of a run, oldest first, until the last one has been evaluated.

    The scores are appended to `run/<name>.jsonl`, a line for each checkpoint, and drawn by
    TensorBoard from `run/tensorboard/<name>`. A checkpoint that has a line is not evaluated again.

    Args:
        run: the directory of the run.
        name: name of the evaluation.
        scores_of: evaluates a checkpoint, given its directory.
        poll_s: seconds between two looks for a new checkpoint.

    Raises:
        ValueError: `run` is not the directory of a run, or there are several processes; or
            `scores_of` raised it.
        OSError: a file cannot be read or written.
    """
    if jax.process_count() > 1:
        raise ValueError("--follow evaluates in one process; start it on one host")
    if not (run / CONFIG_FILE).exists():
        raise ValueError(
            f"{run} has no {CONFIG_FILE}, so it is not the directory of a run; start the run "
            "first, and pass its --workdir"
        )
    seen: set[str] = set()
    # Ctrl-C is how a user ends this, if the run does not.
    with contextlib.closing(_Log(run, name)) as log, contextlib.suppress(KeyboardInterrupt):
        while True:
            for step in _checkpoints(run):
                checksum = _checksum_of(step)
                if checksum is None or checksum in seen:
                    continue
                seen.add(checksum)
                try:
                    is_last = _is_last(step)
                    if not log.has(checksum):
                        _check(step)
                        log.append(int(step.name), checksum, scores_of(step))
                except _Damaged as error:
                    print(f"step {step.name} is skipped: {error}", flush=True)
                    continue
                except (ValueError, OSError):
                    if step.exists():
                        raise
                    print(f"step {step.name}: the run has deleted this checkpoint", flush=True)
                    continue
                if is_last:
                    return
            time.sleep(poll_s)


class _Damaged(ValueError):
    """A checkpoint is damaged."""


class _Log:
    """The files of an evaluation in a run: `<name>.jsonl`, and `tensorboard/<name>/`.

    A line has the step, the SHA-256 of the checkpoint's checksums, and the scores. A score that is
    not finite is written as null, because JSON has no such numbers.
    """

    def __init__(self, run: Path, name: str):
        self._path = run / f"{name}.jsonl"
        self._points = Writer(str(run / "tensorboard" / name))
        self._checksums: set[str] = set()
        if not self._path.exists():
            return
        with open_regular(self._path, within=run) as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # torn by a crash
                    self._checksums.add(str(parse_json(line, self._path).get("checksum")))

    def has(self, checksum: str) -> bool:
        """Return whether a checkpoint has a line."""
        return checksum in self._checksums

    def append(self, step: int, checksum: str, scores: Mapping[str, float]) -> None:
        """Append a line and points, and print the scores."""
        values = {key: value if math.isfinite(value) else None for key, value in scores.items()}
        line = json.dumps({"step": step, "checksum": checksum, **values}, allow_nan=False)
        descriptor = open_in_place(self._path, os.O_WRONLY | os.O_APPEND)
        with os.fdopen(descriptor, "ab") as file:
            file.write(f"{line}\n".encode())
        for key, value in scores.items():
            self._points.add_scalar(key, value, step)
        self._points.flush()
        shown = " ".join(f"{key} {value:.6g}" for key, value in scores.items())
        print(f"step {step} {shown}", flush=True)

    def close(self) -> None:
        """Close the files."""
        self._points.close()


def _checkpoints(run: Path) -> list[Path]:
    """Return the directories of the checkpoints, oldest first; none is outside the run."""
    directory = run / CHECKPOINTS
    check_link(directory, run)
    return [directory / str(step) for step in steps_in(directory)]


def _checksum_of(step: Path) -> str | None:
    """Return the SHA-256 of a checkpoint's checksums; None if it has none, or is deleted."""
    try:
        check_tree(step, step.parent.parent)
        return digest_of(step / CHECKSUMS_FILE, within=step)
    except OSError:
        return None


def _check(step: Path) -> None:
    """Compare a checkpoint with its checksums."""
    damage = find_damage(step)
    if damage is not None and step.exists():
        raise _Damaged(damage)


def _is_last(step: Path) -> bool:
    """Return whether the run ends with a checkpoint."""
    file = config_of(step)
    config = read_yaml(file, within=step.parent.parent)
    check_fields(config, {"train": dict[str, Any]}, file)
    check_fields(config["train"], {"num_steps": int}, f"{file}: train")
    return config["train"]["num_steps"] <= int(step.name)
