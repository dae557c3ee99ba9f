"""Writes numbers by step for TensorBoard.

This uses TensorBoard's record format and messages, but writes to a plain file: TensorBoard's own
writer has a thread and a queue, and imports TensorFlow if it is installed.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
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

from untrusted.appender import Appender


class TensorBoardFile:
    """A new file in a directory that TensorBoard reads, together with the older ones there."""

    def __init__(
        self, directory: Path, *, resume_step: int | None = None, is_patient: bool = False
    ):
        """Create the file.

        Args:
            directory: it is created if necessary.
            resume_step: TensorBoard hides points of older files after this step; None: no points.
            is_patient: as of `Appender`.

        Raises:
            OSError: the file cannot be created or written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # TensorBoard reads the files in the order of their names.
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appender(directory / name, is_patient=is_patient)
        self._append(Event(wall_time=now, file_version="brain.Event:2"))
        if resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=now, step=resume_step + 1, session_log=start))

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a point for each value that is a number.

        Raises:
            OSError: the disk cannot take it, and the file is not patient.
        """
        points = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        content = io.BytesIO()
        RecordWriter(content).write(event.SerializeToString())
        self._file.append(content.getvalue())
