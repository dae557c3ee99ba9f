"""What lies where in a checkpoint, told without jax: names, metrics, and what stays.

A checkpoint is a directory `<step>/` with `state/` (arrays, by name and global shape),
`data_state/metadata` and, if that state was evaluated, `metrics/metrics` (both JSON), and
`checksums.sha256`, which is written last.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE, DATA_STATE, METRICS = "state", "data_state/metadata", "metrics/metrics"

#: In the names of directories that are being written or deleted.
TMP_SUFFIX = ".orbax-checkpoint-tmp"


def steps_in(directory: Path) -> list[int]:
    """Returns the steps that have a checkpoint in a directory, oldest first, damaged or not.

    One that is no directory, or not there, has none.
    """
    names = [path.name for path in directory.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def read_data_state(step: Path) -> dict[str, Any]:
    """Returns the position in the data that lies in a checkpoint."""
    return json.loads((step / DATA_STATE).read_text())


def read_metrics(step: Path) -> dict[str, float]:
    """Returns the metrics of a checkpoint; none if it was not evaluated, or they are damaged."""
    try:
        metrics = json.loads((step / METRICS).read_text())
        return {str(name): float(value) for name, value in metrics.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def best_steps(scores: Mapping[int, float | None], *, num_best: int, best_is_max: bool) -> set[int]:
    """Returns the steps of the best checkpoints.

    Args:
        scores: step -> value of the metric, or None without one: that is never among the best.
            NaN is the worst. Of equal ones the newer is better.
        num_best: the number of the best; fewer are returned if fewer have a value.
        best_is_max: whether large values are good.
    """

    def quality(step: int) -> tuple[bool, float, int]:
        score = scores[step]
        assert score is not None
        comparable = score if best_is_max else -score
        return (False, 0.0, step) if math.isnan(score) else (True, comparable, step)

    evaluated = [step for step, score in scores.items() if score is not None]
    return set(sorted(evaluated, key=quality, reverse=True)[:num_best])
