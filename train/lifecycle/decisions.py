"""Decisions of callbacks and early stopping: to end the run, or to save a checkpoint.

After an evaluation, the first process decides, and the others wait for its answer, so the decision
applies to this step. After a step nobody waits: the request of the first process is sent with the
all-reduce of the next step (agreement.py), and applies one step after that.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from distributed.messages import Exchange
from train.config.schema import RunConfig
from train.lifecycle.callbacks import import_callbacks
from train.lifecycle.early_stopping import EarlyStopping
from train.reporting.metrics import METRICS_FILE, read_metrics


class Decisions:
    """Calls the callbacks of a run, and keeps their requests and the state of early stopping.

    Attributes:
        is_ending: whether the run ends successfully after this step; the same on all processes.
        is_end_requested: whether a step's callback on this process wants that.
        is_save_requested: whether a step's callback on this process wants a checkpoint. Whoever
            acts on it sets it to False.
        reason: why the run ends; on other processes than the first only if an evaluation ends it.
    """

    def __init__(
        self, config: RunConfig, workdir: Path, write: Callable[[int, Mapping[str, float]], object]
    ):
        """Import the callbacks, on the first process.

        Args:
            write: logs the values of a step.

        Raises:
            ValueError: there is no such callback.
        """
        train = config.train
        self._workdir = workdir
        self._write = write
        self._is_first = jax.process_index() == 0
        self._exchange = Exchange()
        self._stops_early = train.early_stopping is not None
        self._early_stopping = EarlyStopping(train, config.checkpoint)
        self._callbacks = import_callbacks(train, workdir) if self._is_first else None
        self._decides_after_evaluation = self._stops_early or bool(train.evaluation_callbacks)
        self.is_ending = False
        self.is_end_requested = False
        self.is_save_requested = False
        self.reason: str | None = None

    def resume(self) -> None:
        """Take the evaluations of earlier starts into account, which the metrics file has."""

        def reason() -> str | None:
            self._early_stopping.replay(read_metrics(self._workdir / METRICS_FILE))
            return self._early_stopping.reason

        if self._stops_early:
            self._end(self._exchange.on_first(reason))

    def after_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Call the callbacks of a logged step."""
        if self._callbacks is None or not self._callbacks.of_steps:
            return
        event = self._callbacks.of_steps.call(step, metrics)
        self._log(event.step, event.logged)
        self.is_save_requested |= event.is_save_requested
        if event.stop_reason is not None:
            self.is_end_requested = True
            self.reason = self.reason or event.stop_reason

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> bool:
        """Call the callbacks of an evaluation, and return whether to save a checkpoint now."""

        def decide() -> tuple[str | None, bool]:
            is_improved = self._stops_early and self._early_stopping.update(step, scores)
            assert self._callbacks is not None, "only the first process decides"
            event = self._callbacks.of_evaluations.call(step, scores)
            self._log(step, event.logged)
            reason = event.stop_reason or self._early_stopping.reason
            return reason, event.is_save_requested or is_improved

        if not self._decides_after_evaluation:
            return False
        reason, is_save_due = self._exchange.on_first(decide)
        self._end(reason)
        return is_save_due

    def _end(self, reason: str | None) -> None:
        if reason is not None:
            self.is_ending = True
            self.reason = self.reason or reason

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if values:
            self._write(step, values)
