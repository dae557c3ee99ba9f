"""What a run leaves on disk about itself: metrics.jsonl and TensorBoard files.

A line of `metrics.jsonl` is a JSON object. A logged step has `step, loss, learning_rate, grad_norm,
step_time_s, data_wait_s, tokens_per_s` (of images: `images_per_s`) and more; an evaluation has
`step, eval_loss, eval_perplexity` (of texts).
"""

import contextlib
import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """When a step is logged."""

    every_steps: int  # steps between two logged ones; 1 logs each

    def __post_init__(self):
        if self.every_steps < 1:
            raise ValueError(
                f"log.every_steps={self.every_steps} must be at least 1; choose a number of steps"
            )


class MetricsWriter:
    """Writes each logged step once, however often the run is killed and resumed.

    A line is in the hands of the operating system when `write` returns, so killing the process
    loses none. While the disk is full, lines wait in memory, and one warning says so. Floats are
    written so that reading gives the same bits; NaN and infinities, which JSON lacks, as the
    strings "NaN", "Infinity", "-Infinity" (`float()` and `read_metrics` read them); None as null.
    """

    def __init__(self, workdir: str | Path, *, resume_step: int, is_writer: bool = True):
        """Opens the files, and drops what a killed run logged after `resume_step`.

        Args:
            workdir: the run's directory, made if need be.
            resume_step: the step the run goes on from; 0 begins anew.
            is_writer: False on all processes but the first; nothing is written then.
        """
        self._lines = self._events = None
        if not is_writer:
            return
        path = Path(workdir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_lines_after(path, resume_step)
        self._lines = _Appender(path)
        self._events = _open_event_file(Path(workdir) / TENSORBOARD_DIRECTORY, resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line, and one point per number to TensorBoard.

        Args:
            step: the number of steps done.
            metrics: name to number: Python's, or a NumPy or JAX scalar.
        """
        if self._lines is None or self._events is None:
            return
        values = {name: _to_python(value) for name, value in metrics.items()}
        line = {"step": int(step)} | {name: _to_json(value) for name, value in values.items()}
        self._lines.append((json.dumps(line, allow_nan=False) + "\n").encode())
        points = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        event = Event(wall_time=time.time(), step=int(step), summary=Summary(value=points))
        self._events.append(_record(event))

    def close(self) -> None:
        """Closes the files."""
        for file in (self._lines, self._events):
            if file is not None:
                file.close()
        self._lines = self._events = None


class _Appender:
    """A file that is appended to; what a full disk does not take is written at the next time."""

    def __init__(self, path: Path):
        self._path, self._pending, self._has_warned = path, b"", False
        self._file = open(path, "ab", buffering=0)

    def append(self, content: bytes) -> None:
        self._pending += content
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not self._has_warned:
                _log.warning("%s cannot be written; the run goes on: %s", self._path, error)
            self._has_warned = True

    def close(self) -> None:
        self.append(b"")
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects of a metrics.jsonl, with NaN and infinities as floats.

    A line that is no JSON object with a step, such as one torn by a crash, is left out.
    """
    objects = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                objects.append({name: _from_json(value) for name, value in entry.items()})
    return objects


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [entry for entry in read_metrics(path) if entry["step"] <= step]
    # A new file that replaces the old in one go: a kill here loses neither.
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="utf-8") as file:
        for entry in kept:
            line = {name: _to_json(value) for name, value in entry.items()}
            file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _open_event_file(directory: Path, resume_step: int) -> _Appender:
    # TensorBoard's own record format and messages, but a plain file: its EventFileWriter has a
    # thread and a queue, and imports TensorFlow where that happens to be installed.
    directory.mkdir(parents=True, exist_ok=True)
    now = time.time()
    # TensorBoard reads the files in the order of their names.
    name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
    file = _Appender(directory / name)
    # A session that starts at a step hides all older points from that step on.
    start = SessionLog(status=SessionLog.START)
    for event in (
        Event(wall_time=now, file_version="brain.Event:2"),
        Event(wall_time=now, step=resume_step + 1, session_log=start),
    ):
        file.append(_record(event))
    return file


def _record(event: Event) -> bytes:
    content = io.BytesIO()
    RecordWriter(content).write(event.SerializeToString())
    return content.getvalue()


def _to_python(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
