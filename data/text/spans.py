"""The positions of documents in text files, from which each document is read on access."""

from pathlib import Path

import numpy as np

from data.examples import BrokenExample
from untrusted.files import open_regular, version_of


class DocumentSpans:
    """The spans of documents in files.

    Args:
        spans: int64[number of documents, 4]: file number, first byte, end byte, line number. A
            corpus can have 10^8 documents, so they are stored in one array.
        versions: (size, modification time) that each file had when its spans were found.
    """

    def __init__(self, spans: np.ndarray, versions: list[tuple[int, int]]) -> None:
        self._spans = spans
        self._versions = versions

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return tuple(self._spans[index].tolist())

    @property
    def num_bytes(self) -> int:
        """The total size of the documents."""
        return int((self._spans[:, 2] - self._spans[:, 1]).sum())

    def read(self, index: int, files: list[Path]) -> tuple[str, Path, int]:
        """Read one document, and convert its line ends to newlines.

        Returns:
            The content of the document, its file, and its line number.

        Raises:
            BrokenExample: The file cannot be read, or has changed since its spans were found.
            ValueError: The bytes are not UTF-8.
        """
        file_number, start, stop, line = self[index]
        file = files[file_number]
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
        return _decode(content, file, start).replace("\r\n", "\n"), file, line


def _decode(content: bytes, file: Path, start: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.paths: {file} is not UTF-8 text (byte {start + error.start} is "
            f"0x{content[error.start]:02x}); convert it to UTF-8"
        ) from error
