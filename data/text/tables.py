"""Parquet and Arrow files, converted to .jsonl files in the cache when they are first used.

Afterwards everything is as for .jsonl files: documents and labeled examples, lines in messages.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.cache import locked
from data.checks import files_key
from data.table_files import SUFFIXES, Budget, convert, num_rows_or_error, open_table
from untrusted.files import make_private_directory, open_new

_log = logging.getLogger(__name__)


def as_lines(files: Sequence[Path], cache: Path, verify: str) -> list[Path]:
    """Replace Parquet and Arrow files by .jsonl files in the cache, which are made if necessary.

    Args:
        verify: config key `data.verify`: how a changed file is noticed.

    Returns:
        The files, in the same order. Files of other kinds are returned as they are.

    Raises:
        ValueError: A file cannot be read.
    """
    return [_lines_of(file, cache, verify) if file.suffix in SUFFIXES else file for file in files]


def _lines_of(file: Path, cache: Path, verify: str) -> Path:
    directory = cache / "tables"
    make_private_directory(directory)
    # Messages about a line name this file, whose lines are the rows of the table.
    target = directory / f"{file.name}-{files_key([file], verify)[:16]}.jsonl"
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
    """Write the rows of a table as lines of JSON; in a process with limits."""
    file = Path(argument["table"])

    def write(budget: Budget) -> None:
        with open_new(Path(argument["lines"])) as stream:
            for record in _records(file, budget):
                line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
                budget.spend(len(line))
                stream.write(line)

    return num_rows_or_error(write, [file])


def _records(file: Path, budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without columns that JSON cannot express, such as images."""
    with open_table(file, budget) as (schema, batches):
        kinds = {each.name: each.type for each in schema if _is_plain(each.type)}
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
        fields = [field for field in kind if _is_plain(field.type)]
        return {
            field.name: _plain(value[field.name], field.type)
            for field in fields
            if value[field.name] is not None
        }
    return value


def _is_plain(kind: Any) -> bool:
    """Return whether JSON can express the values of a type of pyarrow, or fields of them."""
    from pyarrow import types

    if types.is_dictionary(kind):  # columns with few different values, such as pandas categories
        return _is_plain(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return any(_is_plain(field.type) for field in kind)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return is_text or is_number or types.is_null(kind)
