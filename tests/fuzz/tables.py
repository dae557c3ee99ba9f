"""Valid Parquet and Arrow files, and mutations of them that keep to their formats."""

import io
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from data.config import DataConfig
from data.images.unpack import unpack
from data.text.tables import as_lines
from data.text.text_files import find_files
from tests.fuzz.mutations import damaged_bytes, damaged_json
from tests.fuzz.parser import Parser

_INTEGERS = (0, 1, -1, 2, 7, 8, 64, 100, 1000, 2**16, 2**24, 2**30, 2**31 - 1, -(2**31))
_LARGE_INTEGERS = (2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
_PARQUET_MAGIC = b"PAR1"


def _table() -> pa.Table:
    """Return a table with a column of each kind that is read, and others that are left out."""
    count = 12
    texts = [f"row {i}: größer {'x' * i}" for i in range(count)]
    labels = pa.array([f"label {i % 3}" for i in range(count)])
    columns = {
        "text": texts,
        "large": pa.array(texts, pa.large_string()),
        "number": [None, *range(1, count)],
        "label": labels.dictionary_encode(),
        "tokens": [list(range(i)) for i in range(count)],
        "pair": pa.array([[i, -i] for i in range(count)], pa.list_(pa.int16(), 2)),
        "messages": [[{"role": "user", "content": text}, None] for text in texts],
        "nothing": pa.nulls(count),
        "image": [{"bytes": b"\x89PNG" + bytes(i), "path": None} for i in range(count)],
        "score": np.linspace(0, 1, count),
    }
    return pa.table(columns)


def _arrow_writer(kind: str, compression: str | None) -> Callable[[Path], Any]:
    """Return a writer of `rows.arrow`; kind, "file" or "stream", is one of Arrow's formats."""

    def prepare(directory: Path) -> None:
        table = _table().append_column(
            "view", pa.array([f"a view of some text {i}" for i in range(12)], pa.string_view())
        )
        options = pa.ipc.IpcWriteOptions(compression=compression)
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with pa.OSFile(str(directory / "rows.arrow"), "wb") as sink:
            with new(sink, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=5)

    return prepare


def _parquet_writer(compression: str) -> Callable[[Path], Any]:
    def prepare(directory: Path) -> None:
        pq.write_table(
            _table(), directory / "rows.parquet", row_group_size=5, compression=compression
        )

    return prepare


def _write_saved(directory: Path) -> None:
    """Write a folder of `save_to_disk`."""
    datasets.disable_progress_bars()
    rows = [{"text": f"row {i}", "label": i % 2} for i in range(9)]
    datasets.Dataset.from_list(rows).save_to_disk(str(directory / "saved"), num_shards=2)


def _read_lines(path: str) -> Callable[[Path], Any]:
    """Return a parser of a table, or of a folder of tables, as lines of text."""

    def parse(directory: Path) -> None:
        cache = directory / "cache"
        try:
            as_lines(find_files((str(directory / path),)), cache, "times")
        finally:
            left = [file for file in (cache / "tables").glob("*.tmp")]
            shutil.rmtree(cache, ignore_errors=True)
            assert not left

    return parse


def _read_images(path: str) -> Callable[[Path], Any]:
    """Return a parser of a table of images."""

    def parse(directory: Path) -> None:
        cache = directory / "cache"
        config = DataConfig(
            name="image_folder",
            paths=(str(directory / path),),
            objective="image_contrast",
            global_batch_size=1,
            cache_dir=str(cache),
        )
        try:
            unpack(config)
        finally:
            left = [*(cache / "image_tables").glob(".*.tmp-*")]
            shutil.rmtree(cache, ignore_errors=True)
            assert not left

    return parse


@st.composite
def _damaged_integers(draw: Any, contents: Sequence[bytes]) -> bytes:
    """Draw a file some of whose integers, such as offsets and lengths, are replaced or moved."""
    content = bytearray(draw(st.sampled_from(contents)))
    for _ in range(draw(st.integers(1, 3))):
        size, name = draw(st.sampled_from([(4, "<i"), (4, "<i"), (8, "<q"), (1, "<b")]))
        place = draw(st.integers(0, len(content) // size - 1)) * size
        (before,) = struct.unpack_from(name, content, place)
        near = st.integers(before - 20, before + 20)
        values = st.sampled_from((*_INTEGERS, *_LARGE_INTEGERS, len(content)))
        value = draw(near | values) % 256**size
        if draw(st.integers(0, 9)):
            content[place : place + size] = value.to_bytes(size, "little")
        else:
            other = draw(st.integers(0, len(content) // size - 1)) * size
            content[other : other + size] = content[place : place + size]
    return bytes(content)


@st.composite
def _damaged_footers(draw: Any, contents: Sequence[bytes]) -> bytes:
    """Draw Parquet files with wrong numbers in their footers, whose length is right again."""
    content = draw(st.sampled_from(contents))
    (length,) = struct.unpack_from("<I", content, len(content) - 8)
    body = content[: -8 - length]
    footer = content[-8 - length : -8]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(footer) - 1))
        number = draw(st.sampled_from((*_INTEGERS, *_LARGE_INTEGERS)))
        replacement = _varint(2 * number if number >= 0 else -2 * number - 1)  # zigzag
        replacement = draw(st.sampled_from([replacement, footer[place : place + 30] * 50]))
        footer = footer[:place] + replacement + footer[place + draw(st.integers(0, 3)) :]
    return body + footer + struct.pack("<I", len(footer)) + _PARQUET_MAGIC


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 128:
        content.append(value % 128 | 128)
        value //= 128
    return bytes([*content, value])


@st.composite
def _bombs(draw: Any, kind: str) -> bytes:
    """Draw a small file that expands to many rows, long texts or large lists."""
    count = 10 ** draw(st.integers(1, 5))
    size = 10 ** draw(st.integers(0, 5))
    shape = draw(st.sampled_from(["texts", "lists", "nulls", "wide"]))
    if shape == "texts":
        indices = np.zeros(count // 10, np.int8)
        column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * size]))
    elif shape == "lists":
        offsets = pa.array([0, count * (1 if kind == "parquet" else size // 100 + 1)], pa.int32())
        column = pa.ListArray.from_arrays(offsets, pa.nulls(offsets[-1].as_py()))
    elif shape == "nulls":
        column = pa.nulls(count)
    else:
        name = "n" * (size // 10 + 1)
        column = pa.StructArray.from_arrays([pa.array(np.zeros(count // 10, np.int8))], [name])
    table = pa.table({"text": column})
    stream = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, stream, compression="zstd", write_statistics=False)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(stream, table.schema, options=options) as writer:
            writer.write_table(table)
    return stream.getvalue()


def damaged_arrow(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw Arrow files with wrong integers or bytes, or that expand to much more."""
    integers = [_damaged_integers(contents)] * 32
    return st.one_of(*integers, *[damaged_bytes(contents)] * 7, _bombs("arrow"))


def damaged_parquet(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw Parquet files with wrong footers, integers or bytes, or that expand to much more."""
    integers = [_damaged_integers(contents)] * 16
    footers = [_damaged_footers(contents)] * 16
    return st.one_of(*integers, *footers, *[damaged_bytes(contents)] * 7, _bombs("parquet"))


def _lines(file: str, prepare: Any, damaged: Any) -> Parser:
    parse = _read_lines(file)
    return Parser(file=file, prepare=prepare, parse=parse, damaged=damaged, share=2.0)


PARSERS = {
    "Arrow file": _lines("rows.arrow", _arrow_writer("file", None), damaged_arrow),
    "Arrow stream": _lines("rows.arrow", _arrow_writer("stream", "zstd"), damaged_arrow),
    "Arrow file with images": Parser(
        file="rows.arrow",
        prepare=_arrow_writer("file", "lz4"),
        parse=_read_images("rows.arrow"),
        damaged=damaged_arrow,
    ),
    "Parquet": _lines("rows.parquet", _parquet_writer("none"), damaged_parquet),
    "compressed Parquet": _lines("rows.parquet", _parquet_writer("zstd"), damaged_parquet),
    "state of save_to_disk": Parser(
        file="saved/state.json",
        prepare=_write_saved,
        parse=_read_lines("saved"),
        damaged=damaged_json,
        share=0.5,
    ),
}
