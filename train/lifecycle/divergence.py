"""Detects divergence: too many consecutive steps whose loss or gradients are not finite.

A nonfinite step changes no parameters (see train/step/train_step.py), so a single one is harmless.
Many in a row mean that the parameters or the data are broken. Then the run stops, or rolls back to
an earlier checkpoint.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from train.config.train_config import TrainConfig
from train.lifecycle.agreement import wait_for_all
from untrusted.files import write_with

#: Rollbacks per start of a run, with train.on_nonfinite="rollback". A run that needs more will not
#: recover.
MAX_ROLLBACKS = 3

_log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """Too many consecutive steps were not finite; a restart with this config would fail again.

    Attributes:
        first_bad_step: first of these steps, or None if it is not known.
    """

    def __init__(self, message: str, first_bad_step: int | None = None):
        super().__init__(message)
        self.first_bad_step = first_bad_step


class NonfiniteMonitor:
    """Watches for `train.max_nonfinite_steps` consecutive nonfinite steps.

    Every process calls it at every step. All get the same answer, because they read the same
    replicated count.
    """

    def __init__(self, config: TrainConfig, workdir: Path):
        self._config = config
        self._workdir = workdir
        self._previous: tuple[int, Mapping[str, np.ndarray], jax.Array, jax.Array] | None = None
        self._num_rollbacks = 0
        self._streak_start: int | None = None  # first step of the current streak of bad steps

    def first_bad_step(
        self, step: int, local_batch: Mapping[str, np.ndarray], metrics: Mapping[str, jax.Array]
    ) -> int | None:
        """Check whether there were too many nonfinite steps in a row.

        It looks at the step of the previous call, so that it need not wait for the current step.
        If the limit is reached, it saves the rows of that step's batch, and the next call starts
        counting again.

        Args:
            step: step that was just started; the first is 1.
            metrics: metrics of this step; they may not be computed yet.

        Returns:
            None to continue, or the first of the bad steps. Roll back to a checkpoint from before
            that step.

        Raises:
            Diverged: the limit was reached, and `train.on_nonfinite` is "stop" or there were
                MAX_ROLLBACKS rollbacks already.
        """
        count = metrics["num_nonfinite_in_a_row"]
        # In float16 a nonfinite step that halved the loss scale only means that the scale was too
        # large. Only steps at the smallest scale count.
        num_stuck = metrics.get("num_stuck_in_a_row", count)
        previous = self._previous
        self._previous = (step, local_batch, count, num_stuck)
        if previous is None or not self._config.max_nonfinite_steps:
            return None
        bad_step, bad_batch, count, num_stuck = previous
        num_bad = int(count)
        if num_bad == 0:
            self._streak_start = None
        elif self._streak_start is None:
            self._streak_start = bad_step - num_bad + 1
        if self._streak_start is None or int(num_stuck) < self._config.max_nonfinite_steps:
            return None
        # A spike skipped during the streak belongs to it but is not counted, so remember the start
        # of the streak instead of computing it from the count.
        first = self._streak_start
        self._streak_start = None
        self._previous = None
        what = (
            f"the loss or the gradients of {num_bad} steps in a row, up to step {bad_step}, were "
            f"not finite ({_save(bad_batch, bad_step, self._workdir)})"
        )
        if self._config.on_nonfinite == "stop" or self._num_rollbacks == MAX_ROLLBACKS:
            after = f" after {self._num_rollbacks} rollbacks" if self._num_rollbacks else ""
            wait_for_all("diverged")  # a launcher ends all processes when the first one exits
            raise Diverged(
                f"{what}{after}; look for bad examples in that batch, lower "
                "optimizer.learning_rate, or set a wider precision.compute; the next start "
                f"resumes from the last checkpoint before step {first - 1}",
                first,
            )
        self._num_rollbacks += 1
        _log.warning("%s; rollback %d of %d", what, self._num_rollbacks, MAX_ROLLBACKS)
        return first


def _save(local_batch: Mapping[str, np.ndarray], step: int, workdir: Path) -> str:
    """Save this process's part of a batch; return a message with the file, or the error."""
    process = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
    path = workdir / f"nonfinite_step_{step}{process}.npz"
    try:
        write_with(path, lambda file: np.savez(file, allow_pickle=False, **local_batch))
    except OSError as error:
        return f"its batch could not be saved: {error}"
    return f"its batch is in {path}"
