"""Local .txt and .jsonl files as sequences of documents that are read on access.

One pass over the files finds the byte span of each document. Only the spans stay in memory.
"""

import glob
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from untrusted.documents import parse_json
from untrusted.files import open_regular

# A .txt file is cut into documents of about this size. This bounds memory, and lets a single file
# provide both a train and a validation split.
TEXT_PART_BYTES = 32 * 1024


class FileDocuments(Sequence[str]):
    """A sequence of documents that are read and decoded on access.

    Args:
        files: The files that `spans` refers to.
        spans: For each document (file number, first byte, end byte, line number). The line number,
            counted from 1, is for messages.
        text_field: The field of a .jsonl line that contains its text.
    """

    def __init__(self, files: list[Path], spans: "DocumentSpans", text_field: str):
        self._files = files
        self._spans = spans
        self._text_field = text_field

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        content, file, line = self._spans.read(index, self._files)
        if not _is_jsonl(file):
            return content
        return record_of_json(content, file, line, self._text_field)[self._text_field]


class DocumentSpans:
    """A compact list of span tuples.

    A tuple takes 32 bytes (four int64), because a corpus can have 10^8 documents.
    """

    def __init__(self) -> None:
        self._numbers = array("q")

    def append(self, span: tuple[int, int, int, int]) -> None:
        """Append one (file number, first byte, end byte, line number)."""
        self._numbers.extend(span)

    def __len__(self) -> int:
        return len(self._numbers) // 4

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        first = index % len(self) * 4
        return tuple(self._numbers[first : first + 4])  # pyright: ignore[reportReturnType]

    def read(self, index: int, files: list[Path]) -> tuple[str, Path, int]:
        """Read one document.

        Args:
            index: The number of the document.
            files: The files that the spans refer to.

        Returns:
            The content of the document, its file, and its line number.

        Raises:
            ValueError: The bytes are not UTF-8.
        """
        file_number, start, stop, line = self[index]
        file = files[file_number]
        with open_regular(file) as stream:
            stream.seek(start)
            content = stream.read(stop - start)
        return _decode(content, file, start), file, line

    def pop(self, index: int) -> tuple[int, int, int, int]:
        """Remove and return one span."""
        span = self[index]
        del self._numbers[index * 4 : index * 4 + 4]
        return span


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Find the files that match some globs.

    Args:
        patterns: The globs; `~` and `**` are expanded.

    Returns:
        The files, each once, sorted by path.

    Raises:
        FileNotFoundError: A glob matches no file.
        ValueError: A matched file is neither .txt nor .jsonl.
    """
    files: set[Path] = set()
    for pattern in patterns:
        matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
        found = {Path(match) for match in matches if Path(match).is_file()}
        if not found:
            raise FileNotFoundError(
                f"data.paths: no file matches {pattern!r} (in {Path.cwd()}); correct the glob"
            )
        files |= found
    for file in sorted(files):
        if file.suffix not in (".txt", ".jsonl"):
            raise ValueError(
                f"data.paths matches {str(file)!r}, but only .txt and .jsonl files can be read; "
                "narrow the glob or convert the file"
            )
    return sorted(files)


def files_key(files: list[Path]) -> str:
    """Hash the paths, sizes and modification times of files, without reading them."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def open_text_files(
    files: list[Path], text_field: str, validation_fraction: float
) -> dict[str, Sequence[str]]:
    """Split the documents of the files into train and validation, in one pass over the files.

    Args:
        files: The .txt and .jsonl files.
        text_field: The field of a .jsonl line that contains its text.
        validation_fraction: The fraction of documents to hold out.

    Returns:
        Split -> its documents, read on access.

    Raises:
        ValueError: The files contain too few documents for the splits, or a file cannot be read.
    """
    return {
        split: FileDocuments(files, spans, text_field)
        for split, spans in split_files(files, validation_fraction).items()
    }


def split_files(files: list[Path], validation_fraction: float) -> dict[str, DocumentSpans]:
    """Find the spans of the documents of the files, in two splits.

    A hash of its bytes decides whether a document is held out. Therefore duplicates are in the same
    split, and adding files moves no document from one split to the other.

    Args:
        files: The .txt and .jsonl files.
        validation_fraction: The fraction of documents to hold out.

    Returns:
        Split -> the spans of its documents.

    Raises:
        ValueError: The files contain too few documents for the splits, or a file cannot be read.
    """
    train = DocumentSpans()
    validation = DocumentSpans()
    # The document with the smallest hash is held out if no other one is.
    nearest_hash = 2**64
    nearest_index = 0
    for file_number, file in enumerate(files):
        for start, stop, line, content in _spans_of(file):
            hashed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
            held_out = hashed < validation_fraction * 2**64
            if not held_out and hashed < nearest_hash:
                nearest_hash = hashed
                nearest_index = len(train)
            (validation if held_out else train).append((file_number, start, stop, line))
    if validation_fraction and not len(validation) and len(train) > 1:
        validation.append(train.pop(nearest_index))
    _require_documents(files, validation_fraction, len(train), len(validation))
    return {"train": train, "validation": validation}


def _require_documents(files: list[Path], fraction: float, num_train: int, num_held: int) -> None:
    named = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    if num_train + num_held == 0:
        raise ValueError(f"data.paths: there is no text in {named}; add text or correct the glob")
    if num_train == 0 or (fraction and num_held == 0):
        raise ValueError(
            f"data.validation_fraction={fraction} leaves {num_train} documents for train and "
            f"{num_held} for validation in {named}, but both need at least one; add documents, or "
            "set data.validation_fraction=0 to hold out none"
        )


def _spans_of(file: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (first byte, end byte, line number, bytes) of each document that is not blank."""
    try:
        with open_regular(file) as stream:
            start = 3 if stream.read(3) == b"\xef\xbb\xbf" else 0  # Skip a byte order mark.
            stream.seek(start)
            line = 1
            while content := _read_document(stream, file):
                if content.strip():
                    yield start, start + len(content), line, content
                start += len(content)
                line += content.count(b"\n")
    except OSError as error:
        raise ValueError(f"data.paths: {file} cannot be read: {error.strerror}") from error


def _read_document(stream, file: Path) -> bytes:
    """Read the next line of a .jsonl file, or the next part of a .txt file; b'' at its end."""
    if _is_jsonl(file):
        return stream.readline()
    content = stream.read(TEXT_PART_BYTES)
    if len(content) == TEXT_PART_BYTES:
        content += stream.readline(TEXT_PART_BYTES)
        # A text without line ends may be cut anywhere except inside a UTF-8 character, whose
        # continuation bytes are 10xxxxxx.
        while (following := stream.peek(1)[:1]) and following[0] & 0xC0 == 0x80:
            content += stream.read(1)
    return content


def _is_jsonl(file: Path) -> bool:
    return file.suffix == ".jsonl"


def _decode(content: bytes, file: Path, start: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.paths: {file} is not UTF-8 text (byte {start + error.start} is "
            f"0x{content[error.start]:02x}); convert it to UTF-8"
        ) from error


def record_of_json(content: str, file: Path, line: int, text_field: str) -> dict[str, Any]:
    """Parse a .jsonl line, and check that `text_field` contains a string.

    Args:
        content: The line.
        file: The file of the line, for messages.
        line: The line number, for messages.
        text_field: The field that must contain a string.

    Returns:
        The JSON object; lone surrogates in its strings are replaced by '?'.

    Raises:
        ValueError: The line is not a JSON object, or the field is missing or not a string.
    """
    record = parse_json(content, f"data.paths: {file} line {line}", allows_nan=True)
    if not isinstance(record.get(text_field), str):
        raise ValueError(
            f"data.paths: {file} line {line} has the fields {sorted(record)}, but no string in "
            f"data.text_field={text_field!r}; set data.text_field to the field that contains the "
            "text"
        )
    # JSON can encode a lone surrogate, which no tokenizer accepts.
    return {
        key: value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
        for key, value in record.items()
    }
