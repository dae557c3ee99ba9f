"""How long a run goes on while its steps are not finite, and what it leaves behind then.

Such a step changes no parameter (see train/step/train_step.py), so one is harmless. Many in a row
say that the parameters themselves are beyond repair, or the data is.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from train.config.schema import TrainConfig
from train.lifecycle.stop_signals import wait_for_all

#: With train.on_nonfinite="rollback", of each start: one that needs more will not recover.
MAX_ROLLBACKS = 3

_log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """Too many steps in a row were not finite; another start with this config would end alike."""


class NonfiniteMonitor:
    """Watches for `train.max_nonfinite_steps` in a row.

    Every process asks at every step, and all get the same answer: they read one replicated count.
    """

    def __init__(self, config: TrainConfig, workdir: Path):
        self._config, self._workdir = config, workdir
        self._asked: tuple[int, Mapping[str, np.ndarray], jax.Array, jax.Array] | None = None
        self._num_rollbacks = 0
        self._row_start: int | None = None  # of the bad steps that the last one ends

    def first_bad_step(
        self, step: int, rows: Mapping[str, np.ndarray], metrics: Mapping[str, jax.Array]
    ) -> int | None:
        """Returns None to go on, or the first of too many bad steps, from before which to go back.

        It judges the step of the call before, and waits for no later one. When patience ends,
        that step's rows are saved; the call after it begins anew.

        Args:
            step: that was just started, the first is 1.
            rows: of its batch, those that this process holds.
            metrics: what it gave, computed or not.

        Raises:
            Diverged: patience ended, and the config or MAX_ROLLBACKS says to stop.
        """
        count = metrics["num_nonfinite_in_a_row"]
        # In float16 those that made the loss scale smaller say no more than that it was too large.
        stuck = metrics.get("num_stuck_in_a_row", count)
        asked, self._asked = self._asked, (step, rows, count, stuck)
        if asked is None or not self._config.max_nonfinite_steps:
            return None
        bad_step, bad_rows, count, stuck = asked
        num_bad = int(count)
        if num_bad == 0:
            self._row_start = None
        elif self._row_start is None:
            self._row_start = bad_step - num_bad + 1
        if self._row_start is None or int(stuck) < self._config.max_nonfinite_steps:
            return None
        # Spikes that are skipped within the row are in it, and not in the count.
        first, self._row_start, self._asked = self._row_start, None, None
        what = (
            f"the loss or the gradients of {num_bad} steps in a row, the last of them step "
            f"{bad_step}, were not finite ({_save(bad_rows, bad_step, self._workdir)})"
        )
        if self._config.on_nonfinite == "stop" or self._num_rollbacks == MAX_ROLLBACKS:
            after = f" after {self._num_rollbacks} rollbacks" if self._num_rollbacks else ""
            wait_for_all("diverged")  # before one ends, and whoever started it ends the others
            raise Diverged(
                f"{what}{after}; look for bad examples in that batch, lower "
                "optimizer.learning_rate, or compute in a wider precision.compute; the next start "
                "goes on from the last checkpoint"
            )
        self._num_rollbacks += 1
        _log.warning("%s; rollback %d of %d", what, self._num_rollbacks, MAX_ROLLBACKS)
        return first


def _save(rows: Mapping[str, np.ndarray], step: int, workdir: Path) -> str:
    """Writes this process's rows of a batch; returns where they are, or why they are not."""
    process = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
    path = workdir / f"nonfinite_step_{step}{process}.npz"
    try:
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **rows)
    except OSError as error:
        return f"its batch could not be saved: {error}"
    return f"its batch is in {path}"
