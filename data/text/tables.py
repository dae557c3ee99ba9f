"""Parquet and Arrow files, converted to .jsonl files in the cache when they are first used.

Afterwards everything is as for .jsonl files: documents and labeled examples, lines in messages.
A folder that `datasets.Dataset.save_to_disk` has written stands for its .arrow files.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.checks import files_key
from data.locks import locked
from untrusted.documents import read_json
from untrusted.files import check_link, make_private_directory, open_new, open_regular
from untrusted.schema import check_fields

SUFFIXES = (".parquet", ".arrow")
#: Files that `save_to_disk` of a Dataset, and of a DatasetDict, write into their folders.
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_BATCH_ROWS = 1024

Batches = Callable[[list[str], int], Iterator[Any]]

_log = logging.getLogger(__name__)


def files_of_folder(folder: Path) -> list[Path]:
    """Return the .arrow files of a dataset that `datasets` has saved, in order; [] if it is none.

    Args:
        folder: The folder.

    Raises:
        ValueError: It has several splits, or its rows were selected or reordered without rewriting
            the files.
    """
    if (folder / _SPLITS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{_STATE}"))
        raise ValueError(
            f"data.paths: {folder} has the splits {', '.join(splits)}; name the folder of one, "
            f"such as {folder / splits[0] if splits else folder}"
        )
    if not (folder / _STATE).is_file():
        return []
    state = read_json(folder / _STATE, within=folder)
    kinds = {"_data_files": list[dict[str, Any]], "_indices_files": list[Any] | None}
    check_fields(state, kinds, folder / _STATE)
    if state.get("_indices_files"):
        raise ValueError(
            f"data.paths: the rows of {folder} were selected or reordered; call flatten_indices() "
            "before save_to_disk"
        )
    files = [folder / str(each.get("filename")) for each in state["_data_files"]]
    for file in files:
        check_link(file, folder)
    return files


def as_lines(files: Sequence[Path], cache: Path, verify: str) -> list[Path]:
    """Replace Parquet and Arrow files by .jsonl files in the cache, which are made if necessary.

    Args:
        files: Files of any kind.
        cache: The directory of the cache.
        verify: The config key `data.verify`: how a changed file is noticed.

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
            num_rows = 0
            with open_new(temporary) as stream:
                for record in _records(file):
                    stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    num_rows += 1
            os.replace(temporary, target)
            _log.info("%s: %s rows, as lines in %s", file, f"{num_rows:,}", target)
    return target


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without columns that JSON cannot express, such as images."""
    with open_table(file) as (schema, batches):
        kinds = {each.name: each.type for each in schema if _is_plain(each.type)}
        for batch in batches([*kinds], _BATCH_ROWS):
            for row in batch.to_pylist():
                yield {name: _plain(value, kinds[name]) for name, value in row.items()}


def _plain(value: Any, kind: Any) -> Any:
    """Return a value without the fields, in objects within it, that are null or not plain.

    All objects of a column have the same fields. Those that one of them lacks are null in it.

    Args:
        value: A value of a plain type.
        kind: Its type of pyarrow.
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


@contextlib.contextmanager
def open_table(file: Path) -> Iterator[tuple[Any, Batches]]:
    """Open a Parquet or Arrow file.

    Args:
        file: The file.

    Yields:
        Its pyarrow.Schema, and a function (names of columns, most rows) -> its rows, as
        pyarrow.RecordBatch; the batches of an Arrow file have the sizes that they were written in.

    Raises:
        ValueError: The file cannot be read.
    """
    import pyarrow as pa  # slow, and most corpora do not need it
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        with open_regular(file) as stream:
            if file.suffix == ".parquet":
                table = pyarrow.parquet.ParquetFile(stream)
                _check_names(table.schema_arrow.names, file)
                yield (
                    table.schema_arrow,
                    lambda columns, rows: table.iter_batches(batch_size=rows, columns=columns),
                )
            else:
                reader = _arrow_reader(stream)
                _check_names(reader.schema.names, file)
                yield (
                    reader.schema,
                    lambda columns, rows: (batch.select(columns) for batch in reader),
                )
    except OSError as error:
        raise ValueError(f"data.paths: {file} cannot be read: {error}") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.paths: {file} is not a whole {file.suffix[1:].title()} file ({error}); write it "
            "again"
        ) from error


def _check_names(names: Sequence[str], file: Path) -> None:
    """Check that columns have different names."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"data.paths: {file} has several columns with the name {twice[0]!r}; rename or remove "
            "one of them"
        )


def _arrow_reader(stream: Any) -> Any:
    """Return a reader of record batches, from either of Arrow's two formats."""
    import pyarrow as pa
    import pyarrow.ipc

    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        return pyarrow.ipc.open_stream(stream)
    reader = pyarrow.ipc.open_file(stream)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    return pa.RecordBatchReader.from_batches(reader.schema, batches)


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
