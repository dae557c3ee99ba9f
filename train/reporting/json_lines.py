"""Appends JSON objects to a file, a line for each. `untrusted.documents` reads such files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.reporting.appender import Appender
from untrusted.documents import number_as_json


class JsonLines:
    """A file with a JSON object per line.

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
        self._file.append((json.dumps(_as_json(line), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    return number_as_json(value)
