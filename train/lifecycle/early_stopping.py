"""Early stopping: ends a run whose evaluations no longer improve.

The state follows from the recorded evaluations alone, so a run that is killed and resumed stops at
the same step. With `patience=2`:

    step        50    100   150   200
    eval_loss   4.1   3.9   4.0   3.9
                best  best  1st   2nd without an improvement: stop, the best is step 100
"""

from collections.abc import Iterable, Mapping
from typing import Any

from checkpoint.config import CheckpointConfig
from train.config.train_config import TrainConfig


class EarlyStopping:
    """Watches the metric that ranks checkpoints."""

    def __init__(self, train: TrainConfig, checkpoint: CheckpointConfig):
        """Start without evaluations; `train.early_stopping` may be None, which never stops."""
        self._patience = train.early_stopping
        self._min_delta = train.early_stopping_min_delta
        self._metric = checkpoint.best_metric
        self._is_max = checkpoint.best_is_max
        self._best: float | None = None
        self._best_step = 0
        self._num_since_best = 0

    def replay(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take the evaluations of earlier starts into account, in their order.

        Args:
            entries: lines of `metrics.jsonl`; those without the metric are ignored.
        """
        for entry in entries:
            if isinstance(entry.get(self._metric), int | float):
                self.update(entry["step"], entry)

    def update(self, step: int, scores: Mapping[str, float]) -> bool:
        """Take an evaluation into account.

        Returns:
            Whether it is the best so far, by more than `train.early_stopping_min_delta`. NaN never
            is.
        """
        value = scores[self._metric]
        if self._is_better(value):
            self._best = value
            self._best_step = step
            self._num_since_best = 0
            return True
        self._num_since_best += 1
        return False

    @property
    def reason(self) -> str | None:
        """Why the run stops, as a part of a sentence; None if it continues."""
        if self._patience is None or self._num_since_best < self._patience:
            return None
        best = "" if self._best is None else f" since {self._best:.6g} at step {self._best_step}"
        return f"{self._metric} has not improved in {self._num_since_best} evaluations{best}"

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return value == value  # not NaN
        gain = value - self._best if self._is_max else self._best - value
        return gain > self._min_delta
