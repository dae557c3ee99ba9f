"""Appends bytes or lines of JSON to a file, without a buffer in this process that a kill loses."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from untrusted.documents import number_as_json
from untrusted.files import NamedFile, open_in_place

_log = logging.getLogger(__name__)


class Appender:
    """Appends to a file. When `append` returns, the operating system has the content."""

    def __init__(self, path: Path, *, is_patient: bool = False):
        """Open the file, and create it if necessary.

        Args:
            is_patient: if the disk cannot take content, log a warning, once, and keep the content
                in memory until the next `append`, instead of raising an error.

        Raises:
            ValueError: there is a link or something other than a regular file at `path`.
            OSError: the file cannot be opened.
        """
        self._path = path
        self._is_patient = is_patient
        self._pending = b""
        self._has_warned = False
        descriptor = open_in_place(path, os.O_RDWR | os.O_APPEND)
        self._file = NamedFile(descriptor, path, "r+")

    def append(self, content: bytes) -> None:
        """Append bytes.

        Raises:
            OSError: the disk cannot take them, and the file is not patient.
        """
        self._pending += content
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not self._is_patient:
                raise
            if not self._has_warned:
                _log.warning("%s cannot be written; the run continues: %s", self._path, error)
            self._has_warned = True

    def last_byte(self) -> bytes:
        """Return the last byte of the file; none if it is empty."""
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(end - 1, 0))
        return self._file.read(1)

    def close(self) -> None:
        """Write the content that is kept in memory, and close the file.

        Raises:
            OSError: as of `append`.
        """
        try:
            self.append(b"")
        finally:
            self._file.close()


class JsonLines:
    """A file with a JSON object per line, which `untrusted.documents.read_json_lines` reads.

    Floats are written so that reading them restores the same bits. JSON has no NaN and infinities;
    they are written as the strings "NaN", "Infinity" and "-Infinity". None is written as null.
    """

    def __init__(self, path: Path, *, is_patient: bool = False):
        """Open the file, or create it. A last line that a crash tore is ended.

        Args:
            is_patient: as of `Appender`.

        Raises:
            ValueError: there is a link or something other than a regular file at `path`.
            OSError: the file cannot be opened, or its last line not be ended.
        """
        self._file = Appender(path, is_patient=is_patient)
        if self._file.last_byte() not in (b"", b"\n"):
            self._file.append(b"\n")

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Args:
            line: name -> a value for JSON, or a mapping from names to such values.

        Raises:
            OSError: the disk cannot take it, and the file is not patient.
        """
        self._file.append(line_of(line).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_of(value: Mapping[str, Any]) -> str:
    """Return a mapping as such a file has it, with the end of the line."""
    return json.dumps(_as_json(value), allow_nan=False) + "\n"


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    return number_as_json(value)
