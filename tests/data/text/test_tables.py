"""Parquet and Arrow files give the same documents and examples as lines of JSON."""

import datetime
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import DataConfig
from data.corpus import load_corpus
from data.text.tables import as_lines

datasets.disable_progress_bars()

ROWS = [
    {"text": f"Row {i}: größer\n{'x' * (i % 7)}", "target": f"t{i}", "label": i % 3, "bytes": b"\0"}
    for i in range(60)
]


def write(kind: str, directory: Path) -> Path:
    """Write the rows in one format; return the path for `data.paths`."""
    if kind == "jsonl":
        plain = [{k: v for k, v in row.items() if k != "bytes"} for row in ROWS]
        file = directory / "rows.jsonl"
        # The same bytes, because a hash of them decides which rows are held out.
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in plain)
        file.write_text("".join(lines), encoding="utf-8")
        return file
    if kind == "arrow file":  # the other of Arrow's two formats
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(directory / "rows.arrow"), "wb") as sink:
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
        return directory / "rows.arrow"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), directory / "rows.parquet", row_group_size=7)
        return directory / "rows.parquet"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(directory / "saved"), num_shards=2)
    return directory / "saved" if kind == "folder" else directory / "saved" / "*.arrow"


def corpus_of(path: Path, cache: Path, **changes):
    values = {
        "name": "text",
        "paths": (str(path),),
        "tokenizer": "bytes",
        "sequence_length": 16,
        "global_batch_size": 4,
        "validation_fraction": 0.2,
        "cache_dir": str(cache),
    }
    return load_corpus(DataConfig(**values | changes))


OBJECTIVES = {
    "causal_lm": {},
    "seq2seq": {"objective": "seq2seq", "target_length": 8},
    "classification": {"objective": "classification"},
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow file", "folder"])
def test_tables_give_the_same_rows_as_lines(kind, objective, tmp_path):
    expected = corpus_of(write("jsonl", tmp_path), tmp_path / "cache", **OBJECTIVES[objective])
    found = corpus_of(write(kind, tmp_path), tmp_path / "cache", **OBJECTIVES[objective])
    assert found.labels == expected.labels
    for split in ("train", "validation"):
        a = getattr(expected, split)
        b = getattr(found, split)
        assert len(a) == len(b) > 0
        before = a.evaluation_batch(range(len(a)))
        after = b.evaluation_batch(range(len(a)))
        assert before.keys() == after.keys()
        for key in before:
            np.testing.assert_array_equal(before[key], after[key])


def test_categories_are_texts(tmp_path):
    table = pa.table({"text": pa.array([f"row {i % 3}" for i in range(60)]).dictionary_encode()})
    pq.write_table(table, tmp_path / "rows.parquet")
    corpus = corpus_of(tmp_path / "rows.parquet", tmp_path / "cache")
    assert len(corpus.train) > 0


def test_fields_of_objects_that_json_cannot_express_are_left_out(tmp_path):
    """Published conversations have the time of each message."""
    message = {"role": "user", "content": "Hi", "name": None, "time": datetime.datetime(2026, 1, 1)}
    meta = {"image": b"\0", "words": [1]}
    rows = [{"messages": [{**message, "meta": meta}, None]}, {"messages": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (file,) = as_lines([tmp_path / "rows.parquet"], tmp_path / "cache", "times")
    expected = {"role": "user", "content": "Hi", "meta": {"words": [1]}}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"messages": [expected, None]}, {"messages": None}]


def test_columns_have_different_names(tmp_path):
    table = pa.table([pa.array(["a"] * 9), pa.array(["b"] * 9)], names=["text", "text"])
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=r"rows\.arrow has several columns with the name 'text'"):
        corpus_of(tmp_path / "rows.arrow", tmp_path / "cache")


def test_texts_must_be_utf_8(tmp_path):
    rows = pa.array([b"\xff\xfe"] * 60).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet is not a whole Parquet file .*UTF8"):
        corpus_of(tmp_path / "rows.parquet", tmp_path / "cache")


def test_error_names_the_table_and_its_row(tmp_path):
    rows = [*ROWS[:4], {**ROWS[4], "label": None}, *ROWS[5:]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"/rows\.parquet row 5 .*label"):
        corpus_of(tmp_path / "rows.parquet", tmp_path / "cache", objective="classification")


def test_changed_table_is_read_again(tmp_path):
    file = write("parquet", tmp_path)
    cache = tmp_path / "cache"
    first = corpus_of(file, cache)
    assert len([*(cache / "tables").glob("*.jsonl")]) == 1
    again = corpus_of(file, cache)
    assert again.fingerprint == first.fingerprint
    pq.write_table(pa.Table.from_pylist(ROWS[:40]), file)
    assert corpus_of(file, cache).fingerprint != first.fingerprint


def _broken(directory: Path) -> Path:
    file = directory / "rows.parquet"
    file.write_bytes(b"PAR1 but no more")
    return file


def _cut(directory: Path) -> Path:
    write("arrow", directory)
    file = min((directory / "saved").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:200])
    return file


def _outside(directory: Path) -> Path:
    write("folder", directory)
    state = directory / "saved" / "state.json"
    content = json.loads(state.read_text())
    content["_data_files"] = [{"filename": "../secret.arrow"}]
    state.write_text(json.dumps(content))
    return directory / "saved"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_broken, "rows.parquet is not a whole Parquet file"),
        (_cut, "is not a whole Arrow file"),
        (_outside, "secret.arrow"),
    ],
)
def test_unsuitable_tables_are_refused(make, message, tmp_path):
    path = make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        corpus_of(path, tmp_path / "cache")
    assert not [*(tmp_path / "cache").rglob("*.jsonl")]
