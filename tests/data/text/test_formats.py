"""Delimited and compressed files give the documents and examples of .jsonl files."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.config import DataConfig
from data.corpus import load_corpus

ROWS = [
    {
        "text": f'Row {i}: größer, "quoted"\nand\tmore {"x" * (i % 7)}',
        "target": f"t{i}",
        "label": "abc"[i % 3],
    }
    for i in range(40)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
HALF = LINES.index(b"\n", len(LINES) // 2) + 1


def write(kind: str, directory: Path) -> str:
    """Write ROWS with another library than ours; return the path or glob."""
    file = directory / f"rows{kind}"
    if kind in (".csv", ".tsv"):
        with file.open("w", encoding="utf-8-sig", newline="") as stream:
            dialect = "excel" if kind == ".csv" else "excel-tab"
            writer = csv.DictWriter(stream, [*ROWS[0]], dialect=dialect)
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == ".jsonl.gz":
        file.write_bytes(gzip.compress(LINES[:HALF]) + gzip.compress(LINES[HALF:]))
    elif kind == ".jsonl.zst":  # two frames, of which only the first states its size
        second = zstandard.ZstdCompressor(write_content_size=False).compress(LINES[HALF:])
        file.write_bytes(zstandard.compress(LINES[:HALF]) + second)
    elif kind == ".parquet":
        for i in range(4):
            table = pa.Table.from_pylist(ROWS[10 * i : 10 * (i + 1)])
            pq.write_table(table, directory / f"rows-{i}.parquet")
        return str(directory / "rows-*.parquet")
    elif kind == ".json":
        file.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    else:
        file.write_bytes(LINES)
    return str(file)


def config_of(path: str, cache: Path, **changes) -> DataConfig:
    values = {
        "name": "text",
        "paths": (path,),
        "tokenizer": "bytes",
        "sequence_length": 64,
        "global_batch_size": 4,
        "validation_fraction": 0.2,
        "cache_dir": str(cache),
    }
    return DataConfig(**values | changes)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("objective", ["causal_lm", "classification"])
@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl.gz", ".jsonl.zst", ".parquet", ".json"])
def test_rows_are_those_of_a_jsonl_file(kind, objective, tmp_path):
    expected, found = (
        load_corpus(config_of(write(each, tmp_path), tmp_path / "cache", objective=objective))
        for each in (".jsonl", kind)
    )
    assert found.fingerprint == expected.fingerprint
    for rows, others in ((found.train, expected.train), (found.validation, expected.validation)):
        assert len(rows) == len(others) > 0
        for i in range(len(rows)):
            for name, value in others[i].items():
                np.testing.assert_array_equal(rows[i][name], value)


def test_csv_is_read_as_datasets_reads_it(tmp_path):
    path = write(".csv", tmp_path)
    theirs = datasets.load_dataset("csv", data_files=path, split="train", cache_dir=str(tmp_path))
    config = config_of(path, tmp_path / "cache", objective="seq2seq", validation_fraction=0)
    ours = load_corpus(config).train
    for i, row in enumerate(theirs):
        assert isinstance(row, dict)
        text = row["text"].encode()[: config.sequence_length - 1]
        assert bytes(ours[i]["tokens"][: len(text)].astype("u1")) == text


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_text_is_text(compress, tmp_path):
    text = "".join(f"line {i}\n" for i in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    suffix = ".gz" if compress is gzip.compress else ".zst"
    (tmp_path / f"b.txt{suffix}").write_bytes(compress(text.encode()))
    prints = {
        load_corpus(config_of(str(path), tmp_path / "cache")).fingerprint
        for path in (tmp_path / "a.txt", tmp_path / f"b.txt{suffix}")
    }
    assert len(prints) == 1
    with pytest.raises(ValueError, match=rf"b\.txt{suffix}', but .* reads only \.jsonl"):
        path = str(tmp_path / f"b.txt{suffix}")
        load_corpus(config_of(path, tmp_path / "cache", objective="seq2seq"))


CSV = 'text,label\n"a\nb",1\nc,2\n'
GOOD = LINES[:HALF]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", f"{CSV}d\n", r"a\.csv line 5 has 1 values, but the header has 2 names"),
        ("a.csv", f"{CSV},3\n", r"a\.csv line 5: the field 'text' .* is empty"),
        ("a.tsv", CSV.replace(",", "\t") + "d\t3\t4\n", r"a\.tsv line 5 has 3 values"),
        ("a.csv", f'{CSV}"d,3\n', r"a\.csv line 5 is no row of a \.csv file \(unexpected end"),
        ("a.csv", f"{CSV}\udcff,3\n", r"a\.csv is not UTF-8 text after line"),
        ("a.csv", "text,label,text\na,b,c\n", r"a\.csv line 1 must name the columns"),
        ("a.csv", "text,label\n", r"there is no text in .*a\.csv"),
        ("a.csv", "txt,label\na,b\n", r"a\.csv line 2 has the fields \['label', 'txt'\]"),
        ("a.jsonl.gz", gzip.compress(GOOD)[:-9], r"a\.jsonl\.gz is not a whole \.gz file"),
        ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz is not a whole \.gz file"),
        ("a.jsonl.zst", zstandard.compress(GOOD)[:-9], r"a\.jsonl\.zst is not a whole \.zst file"),
        ("a.jsonl.zst", GOOD, r"a\.jsonl\.zst is not a whole \.zst file"),
        ("a.jsonl.gz", gzip.compress(GOOD + b"{}\n"), r"a\.jsonl\.gz line 22 has the fields \[\]"),
        ("a.doc", "", r"only \.txt, .*\.txt\.zst, .* files can be read"),
    ],
)
def test_bad_files_and_rows_are_named(name, content, message, tmp_path):
    file = tmp_path / name
    if isinstance(content, str):
        content = content.encode(errors="surrogateescape")
    file.write_bytes(content)
    changes = {"objective": "classification", "validation_fraction": 0}
    config = config_of(str(file), tmp_path / "cache", **changes)
    with pytest.raises(ValueError, match=message):
        load_corpus(config)


def test_lines_in_a_json_file_are_read_as_lines(tmp_path):
    (tmp_path / "rows.json").write_bytes(LINES)
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    found, expected = (
        load_corpus(config_of(str(tmp_path / f"rows{kind}"), tmp_path / "cache")).fingerprint
        for kind in (".json", ".jsonl")
    )
    assert found == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": ', "row 2 is not valid JSON, or the list has no end"),
        ('[{"text": "a"}', "row 1 is not valid JSON, or the list has no end"),
        ('[{"text": "a"} {"text": "b"}]', "row 1 is not valid JSON, or the list has no end"),
        ('[{"text": "a"}, 3]', "row 2"),
        ("[" * 100_000, "row 1 is not valid JSON, or the list has no end"),
        ("[]", "there is no text in"),
    ],
)
def test_broken_json_files_are_refused(content, message, tmp_path):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(config_of(str(tmp_path / "rows.json"), tmp_path / "cache"))
