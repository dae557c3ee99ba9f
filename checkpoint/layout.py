"""The directory layout of checkpoints, and the choice of the best ones; does not import JAX.

A checkpoint is a directory named by its step:

    300/state/                 arrays, by name and global shape
    300/data_state/metadata    the position in the data (JSON)
    300/metrics/metrics        metrics of the evaluation of this state, if there was one (JSON)
    300/config.yaml            the full config of the run that wrote it
    300/checksums.sha256       checksums of all files above; written last
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.errors import ReadError, read_patiently
from untrusted.documents import read_json

#: The folder of a workdir that contains the checkpoints.
CHECKPOINTS = "checkpoints"

STATE = "state"
STRUCTURE = "state/_METADATA"
MANIFEST = "state/manifest.ocdbt"
DATA_STATE = "data_state/metadata"
METRICS = "metrics/metrics"
CONFIG = "config.yaml"

#: End of the name of a checkpoint whose parameters led to nonfinite steps.
DIVERGED_SUFFIX = ".diverged"

#: End of the name of a checkpoint that was found damaged, once a newer one has been saved.
DAMAGED_SUFFIX = ".damaged"

#: Part of the name of every directory that is being written or deleted.
TMP_SUFFIX = ".orbax-checkpoint-tmp"


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, oldest first.

    Damaged checkpoints are included. If `directory` does not exist or is not a directory, the
    list is empty.

    Raises:
        ReadError: the directory cannot be read.
    """

    def names() -> list[str]:
        # Not Path.glob, which takes a directory that cannot be read for an empty one.
        try:
            with os.scandir(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    folder_names = read_patiently(directory, names)
    return sorted(int(name) for name in folder_names if name.isdecimal() and str(int(name)) == name)


def read_data_state(step: Path) -> dict[str, Any]:
    """Return the position in the data that is stored in a checkpoint.

    Raises:
        ValueError: the file is damaged.
        OSError: there is no such file, or it cannot be read.
    """
    file = step / DATA_STATE
    return read_patiently(file, lambda: read_json(file, within=step))


def read_metrics(step: Path) -> dict[str, float]:
    """Return the metrics by name; empty if the state was not evaluated or the file is damaged.

    Raises:
        ReadError: the file cannot be read. Without its metrics, the best checkpoint would not be
            among those to keep.
    """
    file = step / METRICS
    try:
        metrics = read_patiently(file, lambda: read_json(file, within=step, allows_nan=True))
        return {str(name): float(value) for name, value in metrics.items()}
    except ReadError:
        raise
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def best_steps(scores: Mapping[int, float | None], *, num_best: int, best_is_max: bool) -> set[int]:
    """Return the steps of the best checkpoints.

    NaN counts as worse than any number. Among equal values, the newer checkpoint is better.

    Args:
        scores: value of the metric by step. A checkpoint whose value is None was not evaluated
            and is never among the best.
        num_best: how many to return; fewer are returned if fewer have been evaluated.
    """

    def quality(step: int) -> tuple[bool, float, int]:
        score = scores[step]
        assert score is not None
        comparable = score if best_is_max else -score
        return (False, 0.0, step) if math.isnan(score) else (True, comparable, step)

    evaluated = [step for step, score in scores.items() if score is not None]
    return set(sorted(evaluated, key=quality, reverse=True)[:num_best])
