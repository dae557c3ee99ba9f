"""Callbacks: functions of the user that are called while a run trains.

`train.step_callbacks` are called after every logged step (`log.every_steps`), and
`train.evaluation_callbacks` after every evaluation. Both are called on the first process only, in
the order of the config, but can stop the run and save its state on all processes.
"""

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from train.config.train_config import TrainConfig
from untrusted.imports import import_object

#: Start of the names of the run's own evaluations, from which early stopping resumes.
_RESERVED = "eval_"

_log = logging.getLogger(__name__)


class Event:
    """The end of a step or of an evaluation, as callbacks see it.

    The metrics have just been logged by the run, so a callback never waits for the devices.

    Attributes:
        step: number of steps done.
        metrics: logged values of the step, such as `loss` and `step_time_s`, or scores of the
            evaluation, such as `eval_loss`. A value may be NaN or None.
        workdir: directory of the run's files.
        logged: values that callbacks have logged, by name.
        stop_reason: why a callback asked to end the run; None if none did.
        is_save_requested: whether a callback asked for a checkpoint.
    """

    def __init__(self, step: int, metrics: Mapping[str, Any], workdir: Path):
        self.step = step
        self.metrics = MappingProxyType({**metrics})
        self.workdir = workdir
        self.logged: dict[str, float] = {}
        self.stop_reason: str | None = None
        self.is_save_requested = False

    def log(self, name: str, value: float) -> None:
        """Log a value of this step, to `metrics.jsonl`, TensorBoard and the trackers.

        Args:
            name: any name that the run itself does not log.
            value: number. An array on a device is waited for.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.metrics or name == "step" or name.startswith(_RESERVED):
            raise ValueError(f"the run itself logs {name!r} or may do so; choose another name")
        self.logged[name] = int(value) if isinstance(value, numbers.Integral) else float(value)

    def stop(self, reason: str) -> None:
        """Ask to end the run successfully, with exit code 0, after a save.

        After an evaluation, the run ends at once. After a step, it ends up to two steps later,
        because processes agree on it without waiting for each other. The first reason counts.

        Args:
            reason: it is printed at the end of the run.
        """
        self.stop_reason = self.stop_reason or str(reason)

    def save(self) -> None:
        """Ask for a checkpoint, which is saved when `stop` would end the run."""
        self.is_save_requested = True


class Callbacks:
    """The callbacks of one key of the config.

    If a callback raises an exception, its traceback is logged, once, and the run continues. The
    callback is called again at the next event.
    """

    def __init__(self, paths: Sequence[str], key: str, workdir: Path):
        """Import the callbacks.

        Args:
            paths: import paths.
            key: config key, for messages.

        Raises:
            ValueError: there is no such function.
        """
        self._functions = {path: _import(path, key) for path in paths}
        self._workdir = workdir
        self._failed: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._functions)

    def call(self, step: int, metrics: Mapping[str, Any]) -> Event:
        """Call all of them in turn, with the same event; return it."""
        event = Event(step, metrics, self._workdir)
        for path, function in self._functions.items():
            try:
                function(event)
            except (Exception, SystemExit):
                if path not in self._failed:
                    _log.warning(
                        "the callback %s failed at step %d; the run continues, and later failures "
                        "of this callback are not logged",
                        path,
                        step,
                        exc_info=True,
                    )
                self._failed.add(path)
        return event


@dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """All callbacks of a run."""

    of_steps: Callbacks
    of_evaluations: Callbacks


def import_callbacks(config: TrainConfig, workdir: Path) -> RunCallbacks:
    """Import the callbacks of a run.

    Raises:
        ValueError: one of them does not exist, or is not a function.
    """
    return RunCallbacks(
        of_steps=Callbacks(config.step_callbacks, "train.step_callbacks", workdir),
        of_evaluations=Callbacks(
            config.evaluation_callbacks, "train.evaluation_callbacks", workdir
        ),
    )


def _import(path: str, key: str) -> Callable[[Event], object]:
    function = import_object(path, key)
    if not callable(function):
        raise ValueError(
            f"{key}={path!r} is of type {type(function).__name__}, but must be a function of an "
            "event; see docs/own_parts.md"
        )
    return function
