"""Opens Parquet and Arrow files that may come from a stranger, and limits their expanded size.

Both formats are full of offsets, lengths and counts, and pyarrow checks few of them: a wrong offset
makes a text out of memory that belongs to something else, and 500 bytes can stand for gigabytes.

    parent                            process with limits (untrusted/limited.py)
      convert(write_lines, …) ─────▶    open_table: every batch is validated before a value is read
                                        Budget: counts the rows and bytes that go to the cache
      number of rows, or an error ◀─    a crash or a lack of memory ends only this process

Files are read with `read`, never mapped: a file that changes meanwhile cannot change a batch after
it was validated.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from untrusted.files import open_regular
from untrusted.limited import LimitExceeded, run_limited
from untrusted.limited_process import Limits
from untrusted.messages import shortened

SUFFIXES = (".parquet", ".arrow")
#: Rows of a batch. Rows are converted to Python objects, so a batch takes several times its size.
BATCH_ROWS = 64

# Text compresses 3 to 10 times. Columns that repeat a long prompt in each row reach about 100.
_MAX_EXPANSION = 256
_MIN_BYTES = 16 * 2**20
_MAX_ROWS_PER_BYTE = 16
_MIN_ROWS = 10_000
# Compressed lists of numbers have up to 10 values per byte. A million values take about a second.
_MAX_VALUES_PER_BYTE = 64
_MIN_VALUES = 2_000_000
# A batch of an Arrow file may be compressed, and as large as the file.
_MEMORY_PER_BYTE = 16
_MIN_MEMORY_BYTES = 2**30
# The slowest columns, lists of numbers, are converted at about 1 MB/s of a file.
_BYTES_PER_S = 100_000
_MIN_CPU_S = 30.0

Batches = Callable[[list[str]], Iterator[Any]]


class Budget:
    """Counts the rows, values and bytes that tables expand to.

    It refuses more than real files of their size expand to.
    """

    def __init__(self, files: Sequence[Path]):
        self._files = files
        num_bytes = _size_of(files)
        self.max_bytes = _MIN_BYTES + _MAX_EXPANSION * num_bytes
        self._max_rows = _MIN_ROWS + _MAX_ROWS_PER_BYTE * num_bytes
        self._max_values = _MIN_VALUES + _MAX_VALUES_PER_BYTE * num_bytes
        self._num_bytes = 0
        self._num_values = 0
        self.num_rows = 0

    def spend(self, num_bytes: int) -> None:
        """Count a row.

        Args:
            num_bytes: bytes that it takes in the cache.

        Raises:
            ValueError: The tables expand to too many rows or bytes.
        """
        self.num_rows += 1
        self._num_bytes += num_bytes
        self._check(self.num_rows, self._max_rows, "rows")
        self._check(self._num_bytes, self.max_bytes, "bytes")

    def spend_values(self, num_values: int) -> None:
        """Count the values of a batch before they become Python objects.

        Args:
            num_values: their number; a list and each of its elements are values.

        Raises:
            ValueError: The tables expand to too many values.
        """
        self._num_values += num_values
        self._check(self._num_values, self._max_values, "values")

    def _check(self, number: int, limit: int, what: str) -> None:
        if number > limit:
            raise ValueError(
                f"{_subject(self._files)} expands to more than {limit:,} {what}, which is "
                f"suspicious for {_size_of(self._files):,} bytes; if you trust it, convert it to "
                ".jsonl or image files"
            )


def convert(function: Callable[[Any], Any], argument: Any, files: Sequence[Path]) -> int:
    """Convert tables in a process with limits, and return the number of rows.

    Args:
        function: function of a module that returns `num_rows_or_error(…)`.
        argument: its argument, a JSON value.
        files: tables, whose size determines the limits.

    Raises:
        ValueError: The tables are damaged, or expand to too much.
        OSError: A file cannot be read or written.
    """
    cpu_s = _MIN_CPU_S + _size_of(files) / _BYTES_PER_S
    limits = Limits(
        cpu_s=cpu_s,
        wall_s=20 * cpu_s,  # The file system may be slow.
        memory_bytes=_MIN_MEMORY_BYTES + _MEMORY_PER_BYTE * _size_of(files),
        file_bytes=Budget(files).max_bytes + 2**20,
        reply_bytes=2**20,
    )
    try:
        result = run_limited(function, argument, _subject(files), limits)
    except LimitExceeded as error:
        raise ValueError(
            f"{error}; write it again, or convert it to .jsonl or image files"
        ) from None
    if "error" in result:
        raise OSError(*result["error"])
    return result["num_rows"]


def num_rows_or_error(write: Callable[[Budget], Any], files: Sequence[Path]) -> dict[str, Any]:
    """Convert tables, and return the number of rows or an OSError as JSON; in the limited process.

    Args:
        write: converts the tables, and counts the rows.
    """
    budget = Budget(files)
    try:
        write(budget)
    except OSError as error:
        return {"error": [error.errno, error.strerror, error.filename]}
    return {"num_rows": budget.num_rows}


@contextlib.contextmanager
def open_table(file: Path, budget: Budget) -> Iterator[tuple[Any, Batches]]:
    """Open a Parquet or Arrow file, in a process with limits.

    Args:
        budget: limits the number of values in a batch.

    Yields:
        Its pyarrow.Schema, and a function: names of columns -> its rows, as validated
        pyarrow.RecordBatch of at most BATCH_ROWS rows.

    Raises:
        ValueError: The file is damaged.
        OSError: The file cannot be read.
    """
    import pyarrow as pa  # slow, and most corpora do not need it

    # The other allocators reserve memory, which counts for the limit.
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        with open_regular(file) as stream:
            open_kind = _parquet if file.suffix == ".parquet" else _arrow
            schema, read = open_kind(stream)
            _check_names(schema.names, file)
            yield schema, lambda columns: _valid_batches(read(columns), columns, budget)
    except MemoryError as error:  # also for a length that is only declared
        raise ValueError(
            f"data.paths: {file} takes too much memory ({shortened(error)}); write it again, or "
            "convert it to .jsonl or image files"
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # pyarrow's own errors, for damaged content, have no number
        raise ValueError(
            f"data.paths: {file} is not a whole {file.suffix[1:].title()} file "
            f"({shortened(error)}); write it again"
        ) from error


def _valid_batches(batches: Iterator[Any], columns: list[str], budget: Budget) -> Iterator[Any]:
    for batch in batches:
        batch = batch.select(columns)
        batch.validate(full=True)  # checks offsets, lengths, indices and UTF-8
        budget.spend_values(sum(_num_values(column) for column in batch.columns))
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _num_values(array: Any) -> int:
    """Return the number of values in an array; a list of nulls takes no memory until it is read."""
    from pyarrow import types

    if types.is_struct(array.type):
        return len(array) + sum(_num_values(array.field(i)) for i in range(len(array.type)))
    is_list = types.is_list(array.type) or types.is_large_list(array.type)
    if is_list or types.is_fixed_size_list(array.type):
        return len(array) + _num_values(array.flatten())
    return len(array)


def _check_names(names: Sequence[str], file: Path) -> None:
    """Check that columns have different names."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"data.paths: {file} has several columns with the name {twice[0]!r}; rename or remove "
            "one of them"
        )


def _parquet(stream: Any) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return the schema of a Parquet file, and a function: columns -> batches."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(stream)

    def read(columns: list[str]) -> Iterator[Any]:
        return table.iter_batches(batch_size=BATCH_ROWS, columns=columns, use_threads=False)

    return table.schema_arrow, read


def _arrow(stream: Any) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return the schema of a file in one of Arrow's two formats, and a function -> batches."""
    import pyarrow.ipc

    options = pyarrow.ipc.IpcReadOptions(use_threads=False)
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        reader = pyarrow.ipc.open_stream(stream, options=options)
        return reader.schema, lambda columns: iter(reader)
    file = pyarrow.ipc.open_file(stream, options=options)
    batches = (file.get_batch(number) for number in range(file.num_record_batches))
    return file.schema, lambda columns: batches


def _size_of(files: Sequence[Path]) -> int:
    return sum(os.stat(file).st_size for file in files)


def _subject(files: Sequence[Path]) -> str:
    return f"data.paths: {files[0]}"
