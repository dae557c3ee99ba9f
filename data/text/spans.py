"""The positions of documents in text files, from which each document is read on access."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.examples import BrokenExample
from data.formats import JSON, TABLES
from untrusted.files import open_regular, version_of


class DocumentSpans:
    """The spans of documents in files.

    Args:
        spans: int64[number of documents, 4]: file number, first byte, end byte, line number. A
            corpus can have 10^8 documents, so they are stored in one array.
        versions: (size, modification time) that each file had when its spans were found.
        named: files that messages name instead, because these were converted from them. A line has
            the number of the line, or of a table's row, that it was converted from.
    """

    def __init__(
        self,
        files: list[Path],
        spans: np.ndarray,
        versions: list[tuple[int, int]],
        named: Sequence[Path] | None = None,
    ) -> None:
        self._files = files
        self._named = files if named is None else named
        self._spans = spans
        self._versions = versions

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def num_bytes(self) -> int:
        """The total size of the documents."""
        return int((self._spans[:, 2] - self._spans[:, 1]).sum())

    def size_of(self, index: int) -> int:
        """Return the size of a document in bytes."""
        _, start, stop, _ = self._spans[index].tolist()
        return stop - start

    def file_of(self, index: int) -> Path:
        """Return the file of a document."""
        return self._files[self._spans[index, 0]]

    def place_of(self, index: int) -> str:
        """Return the file and the first line of a document, for messages."""
        file = self._named[self._spans[index, 0]]
        return place_in(file, int(self._spans[index, 3]))

    def read(self, index: int) -> str:
        """Read a document, and convert its line ends to newlines.

        Raises:
            BrokenExample: The file cannot be read, or has changed since its spans were found.
            ValueError: The bytes are not UTF-8.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        file_number, start, stop, _ = self._spans[index].tolist()
        file = self._files[file_number]
        try:
            with open_regular(file) as stream:
                version = version_of(stream.fileno())
                stream.seek(start)
                content = stream.read(stop - start)
        except OSError as error:
            raise BrokenExample(f"data.paths: {file} cannot be read: {error.strerror}") from error
        if version != self._versions[file_number]:
            raise BrokenExample(
                f"data.paths: {file} has changed since this run opened it; restore it, or start "
                "again in another workdir"
            )
        return decode(content, file, start)


def decode(content: bytes, file: Path, start: int) -> str:
    """Decode a document that starts at a byte of a file, and convert its line ends to newlines.

    Raises:
        ValueError: The bytes are not UTF-8.
    """
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.paths: {file} is not UTF-8 text (byte {start + error.start} is "
            f"0x{content[error.start]:02x}); convert it to UTF-8"
        ) from error


def place_in(file: Path, line: int) -> str:
    """Return a file and the number of a line, or of a table's row, for messages."""
    return f"{file} {'row' if file.suffix in (*TABLES, JSON) else 'line'} {line}"
