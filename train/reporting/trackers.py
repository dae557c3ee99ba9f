"""Trackers: services such as Weights & Biases and MLflow that also record a run's metrics.

A tracker may have to wait for a network, so each has a thread of its own with a queue, and nothing
that it does can delay a step or end the run:

    loop ── log ──> queue of at most MAX_WAITING entries ──> thread ──> tracker ──> network

Entries that do not fit into the queue are dropped. Only the first process has trackers. When a run
resumes, its trackers continue their record, whose id is in `WORKDIR/trackers.json`.
"""

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from untrusted.documents import read_json
from untrusted.files import write_text
from untrusted.imports import import_object, is_import_path
from untrusted.schema import check

IDS_FILE = "trackers.json"
#: Entries that may wait for a tracker; the next ones are dropped.
MAX_WAITING = 1000
#: Seconds at the end of a run in which trackers may record the waiting entries.
FINISH_TIMEOUT_S = 30.0
#: The same after a signal or a failure, when the process may be killed soon.
STOP_TIMEOUT_S = 10.0

#: Name of a built-in tracker -> its module, and how to install its package.
_BUILT_IN = {
    "wandb": ("train.reporting.wandb_tracker", "pip install wandb"),
    "mlflow": ("train.reporting.mlflow_tracker", "pip install mlflow-skinny"),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run, as described to a tracker that starts to record it."""

    workdir: Path
    parameters: Mapping[str, Any]  # the full config: "optimizer.learning_rate" -> value
    first_step: int  # steps done; steps after it may be in the record already, after a kill
    record_id: str | None  # `record_id` of the tracker at an earlier start; None at the first one


class Tracker(Protocol):
    """Records the metrics of a run.

    A tracker of your own is a class, or a function, that is called with a TrackedRun and returns
    an object with these methods. All calls are made by one thread of the first process.

    Attributes:
        record_id: identifies the record for later starts of the run. It is optional.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers, which may be NaN. Steps do not decrease, but several calls may share one.

        An exception is logged, once per run, and the next call is made nevertheless.
        """
        ...

    def finish(self, ended: str) -> None:
        """End the record. `ended` is "finished", "stopped" (by a signal, to resume) or "failed"."""
        ...


TrackerFactory = Callable[[TrackedRun], Tracker]


def find_trackers(names: Sequence[str]) -> dict[str, TrackerFactory]:
    """Return the factories of trackers by their names.

    Args:
        names: values of `log.trackers`.

    Raises:
        ValueError: a name is unknown, or its package is not installed or not set up.
    """
    return {name: _find(name) for name in names}


def _find(name: str) -> TrackerFactory:
    if name in _BUILT_IN:
        module_name, command = _BUILT_IN[name]
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(f"log.trackers={name}: {error}; install it: {command}") from error
        module.check_settings()
        return module.start
    if not is_import_path(name):
        raise ValueError(
            f"log.trackers={name!r} is unknown; choose {', '.join(_BUILT_IN)}, or an import path, "
            "package.module:Class"
        )
    factory = import_object(name, "log.trackers")
    if not callable(factory):
        raise ValueError(
            f"log.trackers={name!r} is of type {type(factory).__name__}, but must be a class or a "
            "function that returns a tracker; see docs/watch.md"
        )
    return cast(TrackerFactory, factory)


class Trackers:
    """The trackers of this process."""

    def __init__(
        self,
        factories: Mapping[str, TrackerFactory],
        workdir: Path,
        parameters: Mapping[str, Any],
        first_step: int,
    ):
        """Start to record.

        Raises:
            ValueError: the file with the ids of records is damaged.
            OSError: it cannot be read.
        """
        self._ids = _RecordIds(workdir / IDS_FILE)
        self._threads = [
            _TrackerThread(
                name,
                factory,
                TrackedRun(
                    workdir=workdir,
                    parameters=parameters,
                    first_step=first_step,
                    record_id=self._ids.get(name),
                ),
                self._ids,
            )
            for name, factory in factories.items()
        ]
        for thread in self._threads:
            thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Let all trackers record the numbers among some metrics; this does not wait."""
        values = {name: x for name, x in metrics.items() if isinstance(x, int | float)}
        for thread in self._threads:
            thread.put(step, values)

    def finish(self, ended: str) -> None:
        """End all records. A tracker that does not answer in time is left behind.

        Args:
            ended: how the run ended, as for `Tracker.finish`.
        """
        for thread in self._threads:
            thread.end(ended)
        timeout_s = FINISH_TIMEOUT_S if ended == "finished" else STOP_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                _log.warning(
                    "log.trackers=%s did not end its record in %.0f s; the last values may be "
                    "missing there",
                    thread.tracker_name,
                    timeout_s,
                )


def has_hanging_trackers() -> bool:
    """Return whether a tracker still runs, so that the end of the process could wait for it.

    Libraries of trackers wait for the network when the interpreter exits.
    """
    return any(isinstance(thread, _TrackerThread) for thread in threading.enumerate())


class _RecordIds:
    """The ids of the records of a run, by tracker, in a file."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            self._ids = read_json(path)
        check(self._ids, dict[str, str], path)

    def get(self, name: str) -> str | None:
        return self._ids.get(name)

    def set(self, name: str, record_id: str) -> None:
        with self._lock:
            if self._ids.get(name) != record_id:
                self._ids[name] = record_id
                write_text(self._path, json.dumps(self._ids) + "\n")


class _TrackerThread(threading.Thread):
    """Runs one tracker."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun, ids: _RecordIds):
        # A daemon does not keep the process alive.
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracker_name = name
        self._factory = factory
        self._run = run
        self._ids = ids
        # Its size is checked in `put`, so that the end always fits.
        self._waiting: queue.SimpleQueue[tuple[int, Mapping[str, float]] | str]
        self._waiting = queue.SimpleQueue()
        self._has_dropped = False
        self._has_failed = False

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over some metrics, unless too many are waiting."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((step, metrics))
        elif not self._has_dropped:
            self._has_dropped = True
            _log.warning(
                "log.trackers=%s is too slow: the values of step %d, and later ones while %d are "
                "waiting, are not recorded there; %s has all of them",
                self.tracker_name,
                step,
                MAX_WAITING,
                "metrics.jsonl",
            )

    def end(self, ended: str) -> None:
        """Ask to end the record, after all that is waiting."""
        self._waiting.put(ended)

    def run(self) -> None:
        """Record the entries of the queue, until the end."""
        tracker = self._start_record()
        while tracker is not None:
            entry = self._waiting.get()
            try:
                if isinstance(entry, str):
                    tracker.finish(entry)
                    return
                tracker.log(*entry)
            except (Exception, SystemExit):
                self._report("failed; the run continues, and later failures are not logged")
                if isinstance(entry, str):
                    return

    def _start_record(self) -> Tracker | None:
        try:
            tracker = self._factory(self._run)
            record_id = getattr(tracker, "record_id", None)
            if record_id is not None:
                self._ids.set(self.tracker_name, str(record_id))
            return tracker
        except (Exception, SystemExit):
            self._report("cannot record; the run continues without it")
            return None

    def _report(self, what: str) -> None:
        """Log the current exception, unless an earlier one was logged."""
        if not self._has_failed:
            _log.warning("log.trackers=%s %s", self.tracker_name, what, exc_info=True)
        self._has_failed = True
