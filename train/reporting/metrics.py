"""Writes the metrics of a run to metrics.jsonl and to TensorBoard files.

Each line of `metrics.jsonl` is a JSON object. A logged step has `step, loss, learning_rate,
grad_norm, step_time_s, data_wait_s, tokens_per_s` (for images `images_per_s`) and more; an
evaluation has `step, eval_loss`, and for text `eval_perplexity`.
"""

import io
import json
import logging
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

from fields.field import field
from fields.section import Section
from untrusted.documents import number_as_json, number_from_json, read_json_lines
from untrusted.files import open_in_place, write_text

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section, section="log"):
    """Which steps are logged."""

    every_steps: int = field(
        5,
        "Steps between logged steps; 1: every step. The first and the last step are always logged.",
        ge=1,
        remedy="choose a number of steps",
        required=True,
    )


class MetricsWriter:
    """Writes every logged step exactly once, even if the run is killed and resumed several times.

    When `write` returns, the operating system has the line, so killing the process loses nothing.
    While the disk is full, lines are kept in memory, and one warning is logged.

    Floats are written so that reading them restores the same bits. JSON has no NaN and infinities;
    they are written as the strings "NaN", "Infinity" and "-Infinity", which `float()` and
    `read_metrics` can read. None is written as null.
    """

    def __init__(self, workdir: str | Path, *, resume_step: int, is_writer: bool = True):
        """Open the files, and remove lines that a killed run logged after `resume_step`.

        Args:
            workdir: the run's directory; it is created if necessary.
            resume_step: the step that the run resumes from; 0 at the beginning.
            is_writer: False on all processes except the first; they write nothing.
        """
        self._lines = self._events = None
        if not is_writer:
            return
        path = Path(workdir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_lines_after(path, resume_step)
        self._lines = _Appender(path)
        try:
            self._events = _open_event_file(Path(workdir) / TENSORBOARD_DIRECTORY, resume_step)
        except BaseException:
            self.close()
            raise

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line, and one TensorBoard point per number.

        Args:
            step: number of steps done.
            metrics: name -> Python number or None.
        """
        if self._lines is None or self._events is None:
            return
        line = {"step": int(step)} | {
            name: number_as_json(value) for name, value in metrics.items()
        }
        self._lines.append((json.dumps(line, allow_nan=False) + "\n").encode())
        points = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        event = Event(wall_time=time.time(), step=int(step), summary=Summary(value=points))
        self._events.append(_record(event))

    def close(self) -> None:
        """Close the files."""
        for file in (self._lines, self._events):
            if file is not None:
                file.close()
        self._lines = self._events = None


class _Appender:
    """Appends to a file; content that the disk cannot take is kept and written with the next."""

    def __init__(self, path: Path):
        self._path = path
        self._pending = b""
        self._has_warned = False
        descriptor = open_in_place(path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "ab", buffering=0)

    def append(self, content: bytes) -> None:
        self._pending += content
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not self._has_warned:
                _log.warning("%s cannot be written; the run continues: %s", self._path, error)
            self._has_warned = True

    def close(self) -> None:
        self.append(b"")
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl.

    Lines that are not a JSON object with a step, such as one torn by a crash, are ignored.

    Args:
        path: the file.

    Returns:
        One dict per line, with NaN and infinities as floats.
    """
    return [
        {name: number_from_json(value) for name, value in entry.items()}
        for entry in read_json_lines(Path(path))
        if isinstance(entry.get("step"), int)
    ]


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [entry for entry in read_metrics(path) if entry["step"] <= step]
    lines = [{name: number_as_json(value) for name, value in entry.items()} for entry in kept]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    write_text(path, text, reaches_disk=True)  # atomically, so that a kill here loses nothing


def _open_event_file(directory: Path, resume_step: int) -> _Appender:
    # This uses TensorBoard's record format and messages, but writes to a plain file: TensorBoard's
    # EventFileWriter has a thread and a queue, and imports TensorFlow if it is installed.
    directory.mkdir(parents=True, exist_ok=True)
    now = time.time()
    # TensorBoard reads the files in the order of their names.
    name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
    file = _Appender(directory / name)
    # The start of a session at a step makes TensorBoard hide older points from that step on.
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
