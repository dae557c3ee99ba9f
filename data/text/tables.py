"""Files of other formats, converted to .jsonl or .txt files in the cache when they are first used.

    rows.parquet, rows.arrow      a line for each row
    rows.json                     a line for each object of its list
    rows.csv, rows.tsv            a line for each row, with the number of the line that it begins at
    a.jsonl.gz, b.txt.zst         the content

Afterwards everything is as for .jsonl and .txt files. Messages name the original file, and the
number of its line or row.
"""

import csv
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from data.checks import files_key
from data.formats import COMPRESSED, DELIMITERS, JSON, PLAIN, TABLES, format_of
from data.table_files import Budget, convert, num_rows_or_error, open_table
from untrusted.cached import locked
from untrusted.files import make_private_directory, open_new, open_regular
from untrusted.messages import shortened

# Compressed content is copied in pieces of at most this many bytes.
_PIECE_BYTES = 2**20
# Longest value in a .csv file; the default of Python is 128 KiB.
_MAX_VALUE_BYTES = 64 * 2**20

_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()

_log = logging.getLogger(__name__)


def as_lines(files: Sequence[Path], cache: Path, verify: str) -> list[Path]:
    """Replace files of other formats by .jsonl or .txt files in the cache, made if necessary.

    Args:
        verify: config key `data.verify`: how a changed file is noticed.

    Returns:
        The files, in the same order. .jsonl and .txt files are returned as they are.

    Raises:
        ValueError: A file cannot be read.
    """
    return [file if file.suffix in PLAIN else _converted(file, cache, verify) for file in files]


def _converted(file: Path, cache: Path, verify: str) -> Path:
    directory = cache / "tables"
    make_private_directory(directory)
    suffix = ".txt" if (format_of(file) or "").startswith(".txt") else ".jsonl"
    target = directory / f"{file.name}-{files_key([file], verify)[:16]}{suffix}"
    with locked(target):
        if not target.exists():
            temporary = target.with_suffix(".tmp")
            argument = {"table": str(file), "lines": str(temporary)}
            try:
                num_rows = convert(_write_lines, argument, [file])
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            _log.info("%s: %s rows, as lines in %s", file, f"{num_rows:,}", target)
    return target


def _write_lines(argument: dict[str, str]) -> dict[str, Any]:
    """Write the content of a file as lines; in a process with limits."""
    file = Path(argument["table"])

    def write(budget: Budget) -> None:
        with open_new(Path(argument["lines"])) as stream:
            for line in _lines(file, budget):
                stream.write(line)

    return num_rows_or_error(write, [file])


def open_lines(file: Path) -> io.BufferedReader:
    """Open a file of any format as the .jsonl or .txt file that it would be converted to.

    Call this in a process with limits.

    Raises:
        ValueError: The file is damaged; also while it is read.
    """
    if file.suffix in PLAIN:
        return open_regular(file)
    return io.BufferedReader(_Lines(_lines(file, Budget([file]))), _PIECE_BYTES)


class _Lines(io.RawIOBase):
    """A stream of lines, or pieces of them."""

    def __init__(self, lines: Iterator[bytes]):
        self._lines = lines
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            line = next(self._lines, None)
            if line is None:
                return 0
            self._rest = line
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _lines(file: Path, budget: Budget) -> Iterator[bytes]:
    """Yield the lines of the converted file, or pieces of them, and count their bytes."""
    for line in _uncounted_lines(file, budget):
        budget.spend(len(line))
        yield line


def _uncounted_lines(file: Path, budget: Budget) -> Iterator[bytes]:
    if file.suffix in COMPRESSED:
        yield from _decompressed(file)
    elif file.suffix in TABLES:
        yield from map(_as_line, _records(file, budget))
    elif file.suffix == JSON:
        yield from _listed(file)
    else:
        written = 0
        for number, record in _delimited(file):
            # Blank lines are skipped, so a row has the number of its line in the file.
            yield b"\n" * (number - written - 1) + _as_line(record)
            written = number


def _as_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _listed(file: Path) -> Iterator[bytes]:
    """Yield a line for each object of the list in a .json file; or its lines, if it has no list."""
    with open_regular(file) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.paths: {file} is not UTF-8 text ({error}); convert it") from error
    position = _after_blanks(text, 0)
    if not text.startswith("[", position):
        yield from text.encode().splitlines(keepends=True)
        return
    number = 0
    position = _after_blanks(text, position + 1)
    while not text.startswith("]", position):
        number += 1
        try:
            value, position = _DECODER.raw_decode(text, position)
            position = _after_blanks(text, position)
            if text[position] not in ",]":
                raise ValueError(f"{text[position]!r} follows it in place of a comma")
        except (ValueError, IndexError, RecursionError) as error:
            raise ValueError(
                f"data.paths: {file} row {number} is not valid JSON, or the list has no end "
                f"({shortened(error)}); write it again, or as .jsonl"
            ) from error
        if text[position] == ",":
            position = _after_blanks(text, position + 1)
        yield _as_line(value)


def _after_blanks(text: str, position: int) -> int:
    """Return the position of the next character that is not blank in JSON."""
    match = _BLANKS.match(text, position)
    assert match is not None, "it matches an empty text too"
    return match.end()


def _decompressed(file: Path) -> Iterator[bytes]:
    """Yield the content of a compressed file, in pieces that end at line ends if they are short."""
    with open_regular(file) as stream:
        content = gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else _Zstandard(stream)
        try:
            with io.BufferedReader(content, _PIECE_BYTES) as reader:  # pyright: ignore
                while piece := reader.readline(_PIECE_BYTES):
                    yield piece
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # errors of the format have no number
            raise ValueError(
                f"data.paths: {file} is not a whole {file.suffix} file ({shortened(error)}); "
                "compress it again"
            ) from error


class _Zstandard(io.RawIOBase):
    """The content of a file that zstd has compressed."""

    def __init__(self, stream: BinaryIO):
        import pyarrow as pa  # slow, and most corpora do not need it

        pa.set_memory_pool(pa.system_memory_pool())
        self._stream = pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._stream.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def _delimited(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (number of its first line, fields) of each row of a .csv or .tsv file.

    The first line names the fields. Values may be quoted, and then contain line ends.
    """
    csv.field_size_limit(_MAX_VALUE_BYTES)
    with io.TextIOWrapper(open_regular(file), "utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=DELIMITERS[file.suffix], strict=True)
        names: list[str] = []
        number = 1
        try:
            for row in rows:
                if not names and row:
                    names = row
                    _check_header(names, f"{file} line {number}")
                elif row:
                    if len(row) != len(names):
                        raise ValueError(
                            f"data.paths: {file} line {number} has {len(row)} values, but the "
                            f"header has {len(names)} names; quote values that contain "
                            f"{DELIMITERS[file.suffix]!r} or line ends"
                        )
                    yield number, dict(zip(names, row, strict=True))
                number = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"data.paths: {file} line {number} is no row of a {file.suffix} file ({error}); "
                "fix the line"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data.paths: {file} is not UTF-8 text after line {number}; convert it to UTF-8"
            ) from error


def _check_header(names: Sequence[str], where: str) -> None:
    twice = [name for name in names if names.count(name) > 1 or not name]
    if twice:
        raise ValueError(
            f"data.paths: {where} must name the columns, each with a name of its own, but has "
            f"{shortened(twice[0])} more than once or an empty name; correct the first line"
        )


def _records(file: Path, budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without columns that JSON cannot express, such as images."""
    with open_table(file, budget) as (schema, batches):
        kinds = {each.name: each.type for each in schema if is_plain(each.type)}
        for batch in batches([*kinds]):
            for row in batch.to_pylist():
                yield {name: _plain(value, kinds[name]) for name, value in row.items()}


def _plain(value: Any, kind: Any) -> Any:
    """Return a value without the fields, in objects within it, that are null or not plain.

    All objects of a column have the same fields. Those that one of them lacks are null in it.

    Args:
        kind: its type of pyarrow.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain(value, kind.value_type)
    if isinstance(value, list):
        return [_plain(each, kind.value_type) for each in value]
    if isinstance(value, dict):
        fields = [field for field in kind if is_plain(field.type)]
        return {
            field.name: _plain(value[field.name], field.type)
            for field in fields
            if value[field.name] is not None
        }
    return value


def is_plain(kind: Any) -> bool:
    """Return whether JSON can express the values of a type of pyarrow, or fields of them.

    Columns of other types, such as images, are left out of the lines.
    """
    from pyarrow import types

    if types.is_dictionary(kind):  # columns with few different values, such as pandas categories
        return is_plain(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return is_plain(kind.value_type)
    if types.is_struct(kind):
        return any(is_plain(field.type) for field in kind)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return is_text or is_number or types.is_null(kind)
