"""Adds the path to errors of reading and writing.

Python names the file in errors of opening it, but not in later ones: a disk that fails while a file
is read raises `[Errno 5] Input/output error`.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to an OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


class NamedFile(io.FileIO):
    """An open file without a buffer, whose errors have its path.

    Args:
        descriptor: file descriptor, which is closed with this file.
        mode: "r", "w" or "r+"; nothing is truncated.
    """

    def __init__(self, descriptor: int, path: Path, mode: str):
        super().__init__(descriptor, mode)
        self._path = path

    def read(self, size: int | None = -1) -> Any:
        """Read at most `size` bytes, or the rest of the file."""
        with naming(self._path):
            return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any) -> Any:
        """Read into a buffer; return the number of bytes."""
        with naming(self._path):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        """Read the rest of the file."""
        with naming(self._path):
            return super().readall()

    def write(self, content: Any) -> Any:
        """Write bytes; return how many were written."""
        with naming(self._path):
            return super().write(content)

    def close(self) -> None:
        """Close the file; a network file system may write buffered data only now."""
        with naming(self._path):
            super().close()
