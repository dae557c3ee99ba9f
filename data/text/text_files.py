"""Local .txt and .jsonl files as documents that are read only when asked for."""

import glob
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# A .txt file is cut into documents of about this size, so that memory stays bounded and a single
# file is enough for a train and a validation split.
TEXT_PART_BYTES = 32 * 1024


class FileDocuments(Sequence[str]):
    """Documents by position: spans of files, read and decoded on access.

    Args:
        files: The files that `spans` refers to.
        spans: One (file number, first byte, end byte, line number) a document; the line number,
            counted from 1, is for messages.
        text_field: The field of a .jsonl line that holds its text.
    """

    def __init__(self, files: list[Path], spans: "DocumentSpans", text_field: str):
        self._files, self._spans, self._text_field = files, spans, text_field

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        content, file, line = self._spans.read(index, self._files)
        if not _is_jsonl(file):
            return content
        return record_of_json(content, file, line, self._text_field)[self._text_field]


class DocumentSpans:
    """A compact list of span tuples: 32 bytes each, since a corpus can have 10^8 documents."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def append(self, span: tuple[int, int, int, int]) -> None:
        self._numbers.extend(span)

    def __len__(self) -> int:
        return len(self._numbers) // 4

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        first = index % len(self) * 4
        return tuple(self._numbers[first : first + 4])  # pyright: ignore[reportReturnType]

    def read(self, index: int, files: list[Path]) -> tuple[str, Path, int]:
        """Returns a document's content, its file and its line."""
        file_number, start, stop, line = self[index]
        file = files[file_number]
        with open(file, "rb") as stream:
            stream.seek(start)
            content = stream.read(stop - start)
        return _decode(content, file, start), file, line

    def pop(self, index: int) -> tuple[int, int, int, int]:
        span = self[index]
        del self._numbers[index * 4 : index * 4 + 4]
        return span


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Returns the files that match the globs, each once, sorted by path.

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
    """Returns an identity of the files that changes when one is written; reads none of them."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def open_text_files(
    files: list[Path], text_field: str, validation_fraction: float
) -> dict[str, Sequence[str]]:
    """Returns the documents of the files in two splits, after one pass that finds where they are.

    Raises:
        ValueError: The files hold too few documents for the splits, or a file cannot be read.
    """
    return {
        split: FileDocuments(files, spans, text_field)
        for split, spans in split_files(files, validation_fraction).items()
    }


def split_files(files: list[Path], validation_fraction: float) -> dict[str, DocumentSpans]:
    """Returns where the documents of the files are, in two splits.

    A document goes to validation by a hash of its bytes, so duplicates share a split, and adding
    files moves no document from one split to the other.

    Raises:
        ValueError: The files hold too few documents for the splits, or a file cannot be read.
    """
    train, validation = DocumentSpans(), DocumentSpans()
    # The document nearest to being held out, should chance hold out none.
    nearest_hash, nearest_index = 2**64, 0
    for file_number, file in enumerate(files):
        for start, stop, line, content in _spans_of(file):
            hashed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
            held_out = hashed < validation_fraction * 2**64
            if not held_out and hashed < nearest_hash:
                nearest_hash, nearest_index = hashed, len(train)
            (validation if held_out else train).append((file_number, start, stop, line))
    if validation_fraction and not len(validation) and len(train) > 1:
        validation.append(train.pop(nearest_index))
    _require_documents(files, validation_fraction, len(train), len(validation))
    return {"train": train, "validation": validation}


def _require_documents(files: list[Path], fraction: float, num_train: int, num_held: int) -> None:
    named = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    if num_train + num_held == 0:
        raise ValueError(f"data.paths: {named} hold no text; add text or correct the glob")
    if num_train == 0 or (fraction and num_held == 0):
        raise ValueError(
            f"data.validation_fraction={fraction} leaves {num_train} documents for train and "
            f"{num_held} for validation in {named}, and both need one; add documents, or set "
            "data.validation_fraction=0 to hold out none"
        )


def _spans_of(file: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields (first byte, end byte, line number, bytes) of each document that is not blank."""
    try:
        with open(file, "rb") as stream:
            start = 3 if stream.read(3) == b"\xef\xbb\xbf" else 0  # A byte order mark is no text.
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
    """Returns the next line of a .jsonl file, or the next part of a .txt file; b'' at its end."""
    if _is_jsonl(file):
        return stream.readline()
    content = stream.read(TEXT_PART_BYTES)
    if len(content) == TEXT_PART_BYTES:
        content += stream.readline(TEXT_PART_BYTES)
        # A text without line ends is cut where its bytes allow: never inside a character.
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
    """Returns the JSON object of a line, which has a string in `text_field`.

    Raises:
        ValueError: The line is none, or has none.
    """
    try:
        record = json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"data.paths: {file} line {line} is not valid JSON ({error}); "
            "each line must be one JSON object"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        has = f"the fields {sorted(record)}" if isinstance(record, dict) else "no fields"
        raise ValueError(
            f"data.paths: {file} line {line} has {has}, but no string in "
            f"data.text_field={text_field!r}; name the field that holds the text"
        )
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return {
        key: value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
        for key, value in record.items()
    }
