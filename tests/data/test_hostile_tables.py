"""Parquet and Arrow files with wrong offsets, or with much more content than they seem to have."""

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import table_files
from data.config import DataConfig
from data.images.unpack import unpack
from data.text.tables import as_lines


def write_arrow(table: pa.Table, file: Path, *, compression: str | None = None) -> Path:
    """Write a table in Arrow's file format."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(file), "wb") as sink:
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    return file


def patch(file: Path, before: list[int], after: list[int], kind: str = "<i4") -> None:
    """Replace the only sequence of these integers in a file."""
    content = file.read_bytes()
    old = np.array(before, kind).tobytes()
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, np.array(after, kind).tobytes()))


def check_refused(file: Path, cache: Path, message: str) -> None:
    """Check that a table is refused in one sentence, and leaves nothing in the cache."""
    with pytest.raises(ValueError, match=message) as error:
        as_lines([file], cache, "times")
    assert str(error.value).startswith(f"data.paths: {file} ")
    assert {path.suffix for path in (cache / "tables").iterdir()} == {".lock"}


#: The first bytes of a zstd frame.
MAGIC = 0xFD2FB528 - 2**32
TEXTS = pa.array(["one", "three", "fifteen", "x"])
COLUMNS: dict[str, tuple[pa.Array, list[int], list[int], str]] = {
    # A text longer than the column, which includes whatever comes after it in memory.
    "texts": (TEXTS, [0, 3, 8, 15, 16], [0, 3, 8, 15, 79], "<i4"),
    "texts far away": (TEXTS, [0, 3, 8, 15, 16], [0, 3, 8, 2**30, 2**30 + 9], "<i4"),
    "negative lengths": (TEXTS, [0, 3, 8, 15, 16], [0, 3, 8, 7, 16], "<i4"),
    "large texts": (TEXTS.cast(pa.large_string()), [3, 8, 15, 16], [3, 8, 15, 90], "<i8"),
    "lists": (pa.array([[7], [8, 9], [1, 2, 3]]), [0, 1, 3, 6], [0, 1, 3, 20], "<i4"),
    "categories": (
        pa.DictionaryArray.from_arrays(pa.array([3, 2, 1, 0], pa.int32()), TEXTS),
        [3, 2, 1, 0],
        [3, 2, 1, 77],
        "<i4",
    ),
    # Length, first four characters, number of a buffer, offset in it.
    "views": (
        pa.array(["some text of 24 letters."], pa.string_view()),
        [24, *struct.unpack("<i", b"some"), 0, 0],
        [24, *struct.unpack("<i", b"some"), 0, 64],
        "<i4",
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_arrow_offsets_cannot_leave_their_column(name, tmp_path):
    column, before, after, kind = COLUMNS[name]
    file = write_arrow(pa.table({"text": column}), tmp_path / "rows.arrow")
    patch(file, before, after, kind)
    check_refused(file, tmp_path / "cache", "is not a whole Arrow file")


def test_image_offsets_cannot_leave_their_column(tmp_path):
    images = pa.array([b"one", b"three", b"fifteen"])
    file = write_arrow(pa.table({"image": images}), tmp_path / "rows.arrow")
    patch(file, [0, 3, 8, 15], [0, 3, 8, 60])
    config = DataConfig(
        name="image_folder",
        paths=(str(file),),
        objective="image_contrast",
        global_batch_size=1,
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(ValueError, match="is not a whole Arrow file"):
        unpack(config)
    folder = tmp_path / "cache" / "image_tables"
    assert {path.suffix for path in folder.iterdir()} == {".lock"}


def test_a_small_parquet_file_cannot_fill_the_cache(tmp_path):
    """A dictionary of one text, and one run of references to it."""
    file = tmp_path / "rows.parquet"
    table = pa.table({"text": pa.array(["x" * 4000] * 10_000)})
    pq.write_table(table, file, compression="zstd", write_statistics=False, store_schema=False)
    assert file.stat().st_size < 1000
    check_refused(file, tmp_path / "cache", "expands to more than .* which is suspicious for")


def nulls(count: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count))


@pytest.mark.parametrize(
    "lists",
    [
        nulls(10**9),
        nulls(10**7),  # fits into memory, but takes seconds
        pa.FixedSizeListArray.from_arrays(nulls(10**9), 1),
        pa.StructArray.from_arrays([nulls(10**9)], ["a"]),
    ],
)
def test_a_small_arrow_file_cannot_have_lists_of_many_nulls(lists, tmp_path):
    file = write_arrow(pa.table({"text": lists}), tmp_path / "rows.arrow")
    check_refused(file, tmp_path / "cache", "expands to more than .* values, which is suspicious")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_small_compressed_arrow_file_cannot_take_all_memory(compression, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_MIN_MEMORY_BYTES", 100 * 2**20)
    texts = pa.array(["x" * 2**28], pa.large_string())
    file = write_arrow(pa.table({"text": texts}), tmp_path / "rows.arrow", compression=compression)
    check_refused(
        file, tmp_path / "cache", "takes (more than .* MiB of|too much) memory.*; write it again"
    )


def test_compressed_sizes_that_are_declared_only_are_refused(tmp_path):
    file = write_arrow(pa.table({"text": ["x"]}), tmp_path / "rows.arrow", compression="zstd")
    # The size of the offsets becomes 4 EiB.
    patch(file, [8, 0, MAGIC], [0, 2**30, MAGIC])
    check_refused(
        file, tmp_path / "cache", "takes too much memory .*; write it again|is not a whole"
    )


def test_errors_of_the_file_system_stay_what_they_are(tmp_path, monkeypatch):
    """A full disk is no reason to call a table damaged."""
    file = write_arrow(pa.table({"text": TEXTS}), tmp_path / "rows.arrow")
    monkeypatch.setattr("data.text.tables.files_key", lambda *_: "0" * 16)
    (tmp_path / "cache" / "tables" / f"rows.arrow-{'0' * 16}.tmp").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="rows.arrow-0000000000000000.tmp"):
        as_lines([file], tmp_path / "cache", "times")
