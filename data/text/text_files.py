"""Local .txt and .jsonl files as sequences of documents that are read on access.

Files of other formats are converted to such files first (tables.py).

One pass over the files finds the byte span of each document. Only the spans stay in memory.
"""

import hashlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from data.checks import matches_of
from data.formats import format_of, named_formats
from data.saved_sets import files_of_folder
from data.sequences import LazySequence
from data.text.hold_out import TOLERANCE, check_share, held_out_shares
from data.text.spans import DocumentSpans, decode, place_in
from untrusted.documents import parse_json
from untrusted.files import open_regular, version_of
from untrusted.messages import without_surrogates

logger = logging.getLogger(__name__)

# Increase this when files are divided in another way: they are then tokenized again.
REVISION = 2
# A .txt file is cut into documents of about this size. This bounds memory, and lets a single file
# provide both a train and a validation split.
TEXT_PART_BYTES = 32 * 1024
# Longest line of a .jsonl file. A sparse file can claim to have a line of terabytes.
MAX_LINE_BYTES = 64 * 2**20


def lazy_documents(spans: DocumentSpans, text_field: str) -> Sequence[str]:
    """Return documents that are read and decoded on access.

    Args:
        text_field: field of a .jsonl line that contains its text.
    """

    def read(index: int) -> str:
        content = spans.read(index)
        if _is_text(spans.file_of(index)):
            return content
        return record_of_json(content, spans.place_of(index), text_field)[text_field]

    return LazySequence(len(spans), read)


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that match some globs, each once, sorted by path.

    Args:
        patterns: globs; `~` and `**` are expanded.

    Raises:
        FileNotFoundError: A glob matches no file.
        ValueError: A matched file is of another kind.
    """
    files: set[Path] = set()
    for pattern in patterns:
        matches = matches_of(pattern)
        matched_files = {Path(match) for match in matches if Path(match).is_file()}
        folder = next((Path(match) for match in matches if Path(match).is_dir()), None)
        if not matched_files and folder is not None:
            matched_files = set(files_of_folder(folder))
        if not matched_files and folder is not None:
            raise FileNotFoundError(
                f"data.paths: {pattern!r} is a folder; name its files, such as "
                f"'{folder}/*.txt' or, with subfolders, '{folder}/**/*.jsonl'"
            )
        if not matched_files:
            raise FileNotFoundError(
                f"data.paths: no file matches {pattern!r} (in {Path.cwd()}); correct the glob"
            )
        files |= matched_files
    for file in sorted(files):
        if format_of(file) is None:
            raise ValueError(
                f"data.paths matches {str(file)!r}, but only {named_formats()} files can be read; "
                "narrow the glob or convert the file"
            )
    return sorted(files)


def split_files(
    files: list[Path],
    validation_fraction: float,
    sequence_length: int,
    named: Sequence[Path] | None = None,
) -> dict[str, DocumentSpans]:
    """Find the spans of the documents of the files, in two splits.

    A hash of its content decides whether a document is held out; see data/text/hold_out.py.
    Therefore duplicates are in the same split, and adding files to a large corpus moves no document
    to the other split.

    Args:
        files: .txt and .jsonl files.
        validation_fraction: fraction of the text to hold out.
        sequence_length: tokens of a sequence, each of which has at least one byte.
        named: files that messages name instead, from which these were converted.

    Raises:
        ValueError: The files contain too few documents for the splits, or a file cannot be read.
    """
    versions: list[tuple[int, int]] = []
    numbers = array("q")
    hashed = array("Q")
    for file_number, file in enumerate(files):
        for start, stop, line, content in _spans_of(file, versions):
            numbers.extend((file_number, start, stop, line))
            unix = content.replace(b"\r\n", b"\n")
            hashed.append(int.from_bytes(hashlib.blake2b(unix, digest_size=8).digest(), "big"))
    spans = np.frombuffer(numbers, np.int64).reshape(-1, 4)
    hashes = np.frombuffer(hashed, np.uint64)
    may_cut = np.array([_is_text(file) for file in files])[spans[:, 0]]
    sizes = spans[:, 2] - spans[:, 1]
    shares = held_out_shares(sizes, hashes, may_cut, validation_fraction)
    spans, is_held = _cut_at_boundary(spans, shares, files)
    splits = {
        "train": DocumentSpans(files, spans[~is_held], versions, named),
        "validation": DocumentSpans(files, spans[is_held], versions, named),
    }
    first = files[0] if named is None else named[0]
    what = str(first) if len(files) == 1 else f"{first} and {len(files) - 1} more files"
    _require_documents(what, validation_fraction, *map(len, splits.values()))
    held = splits["validation"].num_bytes
    total = held + splits["train"].num_bytes
    check_share(held, total, validation_fraction, sequence_length, what)
    if validation_fraction:
        logger.info(
            "Held out for validation: %d of %d documents, %.1f %% of %s bytes of text",
            len(splits["validation"]),
            len(spans),
            100 * held / total,
            f"{total:,}",
        )
    return splits


def _cut_at_boundary(
    spans: np.ndarray, shares: np.ndarray, files: list[Path]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the spans, with one of a .txt file cut in two, and whether each is held out."""
    cut = np.flatnonzero((shares > 0) & (shares < 1))
    if not len(cut):
        return spans, shares == 1
    number = int(cut[0])
    file_number, start, stop, line = spans[number].tolist()
    with open_regular(files[file_number]) as stream:
        stream.seek(start)
        content = stream.read(stop - start)
    middle = _end_of_line(content, round(float(shares[number]) * len(content)))
    is_held = shares == 1
    if not 0 < middle < len(content):
        is_held[number] = middle > 0
        return spans, is_held
    lines = content[:middle].count(b"\n")
    parts = [
        (file_number, start, start + middle, line),
        (file_number, start + middle, stop, line + lines),
    ]
    spans = np.concatenate([spans[:number], np.array(parts, np.int64), spans[number + 1 :]])
    return spans, np.concatenate([is_held[:number], [True, False], is_held[number + 1 :]])


def _end_of_line(content: bytes, position: int) -> int:
    """Return the position after the line end nearest to a position, or after a character."""
    before = content.rfind(b"\n", 0, position) + 1
    after = content.find(b"\n", position) + 1 or len(content)
    nearest = before if position - before <= after - position else after
    if abs(nearest - position) <= TOLERANCE * len(content):
        return nearest
    # The continuation bytes of a UTF-8 character are 10xxxxxx.
    while position < len(content) and content[position] & 0xC0 == 0x80:
        position += 1
    return position


def _require_documents(named: str, fraction: float, num_train: int, num_held: int) -> None:
    if num_train + num_held == 0:
        raise ValueError(f"data.paths: there is no text in {named}; add text or correct the glob")
    if num_train == 0 or (fraction and num_held == 0):
        raise ValueError(
            f"data.validation_fraction={fraction} leaves {num_train} documents for train and "
            f"{num_held} for validation in {named}, but both need at least one; add documents, or "
            "set data.validation_fraction=0 to hold out none"
        )


def _spans_of(file: Path, versions: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (first byte, end byte, line number, bytes) of each document that is not blank.

    Args:
        versions: version of the file is appended to this list.
    """
    try:
        with open_regular(file) as stream:
            versions.append(version_of(stream.fileno()))
            yield from _spans_in(stream, file)
    except OSError as error:
        raise ValueError(f"data.paths: {file} cannot be read: {error.strerror}") from error


def _spans_in(stream: BufferedReader, file: Path) -> Iterator[tuple[int, int, int, bytes]]:
    start = 3 if stream.peek(3)[:3] == b"\xef\xbb\xbf" else 0  # Skip a byte order mark.
    stream.read(start)
    line = 1
    while content := _read_document(stream, is_text=_is_text(file)):
        if len(content) > MAX_LINE_BYTES:
            raise ValueError(
                f"data.paths: {file} line {line} is too long: it has more than "
                f"{MAX_LINE_BYTES // 2**20} MiB; divide it into several documents"
            )
        if content.strip():
            yield start, start + len(content), line, content
        start += len(content)
        line += content.count(b"\n")


def read_documents(stream: BufferedReader, file: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of a file, as `lazy_documents` returns them, in one pass.

    Args:
        stream: lines or text of the file; see `tables.open_lines`.

    Raises:
        ValueError: A document is too long, not UTF-8, or no JSON object with the field.
    """
    for start, _, line, content in _spans_in(stream, file):
        text = decode(content, file, start)
        if not _is_text(file):
            text = record_of_json(text, place_in(file, line), text_field)[text_field]
        yield text


def _read_document(stream: BufferedReader, *, is_text: bool) -> bytes:
    """Read the next line of a .jsonl file, or the next part of a .txt file; b'' at its end.

    A part of a .txt file ends at the first line end after TEXT_PART_BYTES. A Windows line
    end counts as one byte, so that the parts do not depend on it. A text without line ends is cut
    after twice as many bytes, or a few more for a whole character.
    """
    if not is_text:
        return stream.readline(MAX_LINE_BYTES + 1)
    lines = []
    left = 2 * TEXT_PART_BYTES
    while left > TEXT_PART_BYTES - 1 and (line := stream.readline(left)):
        lines.append(line)
        left -= len(line) - line.endswith(b"\r\n")
        if len(line) > left and not line.endswith(b"\n"):
            # A UTF-8 character has at most 3 continuation bytes, which are 10xxxxxx.
            for _ in range(3):
                following = stream.peek(1)[:1]
                if not following or following[0] & 0xC0 != 0x80:
                    break
                lines.append(stream.read(1))
            break
    return b"".join(lines)


def _is_text(file: Path) -> bool:
    """Return whether a file is cut into documents; otherwise its lines or rows are records."""
    return (format_of(file) or "").startswith(".txt")


def record_of_json(content: str, place: str, text_field: str) -> dict[str, Any]:
    """Parse a .jsonl line, and check that `text_field` contains a string.

    Args:
        place: file and number of the line, for messages.

    Returns:
        The JSON object; lone surrogates in its strings are replaced by '?'.

    Raises:
        ValueError: The line is not a JSON object, or the field is missing or not a string.
    """
    record = parse_json(content, f"data.paths: {place}", allows_nan=True)
    if not isinstance(record.get(text_field), str):
        raise ValueError(
            f"data.paths: {place} has the fields {sorted(record)}, but no string in "
            f"data.text_field={text_field!r}; set data.text_field to the field that contains the "
            "text"
        )
    # JSON can encode a lone surrogate, which no tokenizer accepts.
    return {
        key: without_surrogates(value) if isinstance(value, str) else value
        for key, value in record.items()
    }
