"""Shards at URLs and on the Hugging Face hub: rows as of local files, and errors that name them."""

import gzip
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data.config import DataConfig
from data.corpus import load_corpus
from data.examples import BrokenExample
from data.text.streaming import first_row
from tests.data.corpora import assert_rows, take
from tests.data.test_store_files import web_server
from tests.data.text.streaming.shard_files import (
    as_lines,
    batches,
    config_of,
    refused,
    write_shards,
)
from tests.data.text.streaming.watching import size_of


@pytest.fixture
def files(tmp_path) -> dict[str, bytes]:
    """Return name -> content of the shards, which are in `tmp_path` too."""
    write_shards(tmp_path)
    return {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def put(store, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        store.pipe(f"/texts/{name}", content)


def streamed(directory: Path, *paths: str, **changes) -> DataConfig:
    return config_of(directory, paths=paths, cache_dir=str(directory / "remote"), **changes)


def assert_equal_to_local(config: DataConfig, directory: Path) -> None:
    local = config_of(directory)
    with batches(config) as remote, batches(local) as expected:
        assert_rows(take(remote, 40), take(expected, 40), slice(None))


@pytest.mark.thorough
def test_objects_give_the_rows_of_local_files(memory_store, files, tmp_path):
    put(memory_store, files)
    config = streamed(tmp_path, "memory://texts/*.jsonl*", "memory://texts/6.csv")
    assert_equal_to_local(config, tmp_path)
    assert not (tmp_path / "remote" / "stores").exists()
    assert {file.suffix for file in (tmp_path / "remote" / "streams").iterdir()} == {".tokens"}


@pytest.mark.thorough
def test_files_of_a_web_server_give_the_rows_of_local_files(files, tmp_path):
    with web_server(tmp_path) as url:
        config = streamed(tmp_path, *(f"{url}/{name}" for name in files))
        assert_equal_to_local(config, tmp_path)


@pytest.mark.thorough
def test_files_on_the_hub_give_the_rows_of_local_files(hub, files, tmp_path, capfd):
    commit = hub.commit("me/texts", files, kind="datasets")
    config = streamed(tmp_path, f"hf://datasets/me/texts@{commit}/*.*")
    assert_equal_to_local(config, tmp_path)
    assert {*hub.downloads()} == {name for name, content in files.items() if content}
    assert "%|" not in capfd.readouterr().err, "progress bars would cut the lines of the log"
    assert size_of(tmp_path / "hf_home") < 100, "the cache of the hub does not grow"


@pytest.mark.thorough
def test_object_that_changes_or_vanishes_ends_the_run(memory_store, files, tmp_path):
    put(memory_store, files)
    name = "memory://texts/0.jsonl"
    with batches(streamed(tmp_path, "memory://texts")) as iterator:
        memory_store.pipe("/texts/0.jsonl", files["0.jsonl"])  # the same bytes, but written anew
        with pytest.raises(BrokenExample, match=f"data.paths: {name} has changed since this run"):
            take(iterator, 100)
    with batches(streamed(tmp_path, "memory://texts")) as iterator:
        memory_store.rm("/texts/0.jsonl")
        with pytest.raises(BrokenExample, match=f"data.paths: {name} has been deleted since"):
            take(iterator, 100)


@pytest.mark.thorough
def test_broken_object_is_named_by_its_url(memory_store, files, tmp_path):
    put(memory_store, files | {"5.jsonl.gz": b"no gzip"})
    message = refused(streamed(tmp_path, "memory://texts"))
    assert message.startswith("data.paths: memory://texts/5.jsonl.gz is not a whole .gz file")


def test_object_larger_than_its_part_of_the_cache_is_refused_at_the_start(
    memory_store, files, tmp_path
):
    put(memory_store, files)
    with pytest.raises(ValueError, match="data.paths: memory://texts/3.jsonl.parquet and its tok"):
        load_corpus(streamed(tmp_path, "memory://texts", cache_gb=4e-6))
    with pytest.raises(ValueError, match="no file matches memory://texts/x"):
        load_corpus(streamed(tmp_path, "memory://texts/x*"))
    memory_store.pipe("/texts/a.bin", b"")
    with pytest.raises(ValueError, match="data.paths matches 'memory://texts/a.bin', but only"):
        load_corpus(streamed(tmp_path, "memory://texts"))


@pytest.fixture
def long_files(tmp_path) -> dict[str, bytes]:
    """Return name -> content of shards that are longer than the part that the check reads."""
    texts = [f"{number} " * 100 for number in range(30_000)]
    lines = as_lines(texts).encode()
    table = pyarrow.table({"text": texts, "id": range(len(texts))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    return {"a.jsonl": lines, "a.parquet": content, "a.jsonl.gz": gzip.compress(lines)}


@pytest.mark.thorough(but=["store-a.jsonl", "hub-a.parquet"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("kind", ["store", "web", "hub"])
def test_part_of_a_remote_shard_shows_that_the_field_is_missing(
    kind, name, long_files, memory_store, hub, tmp_path, monkeypatch
):
    content = long_files[name]
    monkeypatch.setattr(first_row, "_PART_BYTES", 2**15)
    assert len(content) > 2**15
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / name).write_bytes(content)
    put(memory_store, {name: content})
    commit = hub.commit("me/texts", {name: content}, kind="datasets")
    with web_server(tmp_path / "web") as server:
        url = {
            "store": f"memory://texts/{name}",
            "web": f"{server}/{name}",
            "hub": f"hf://datasets/me/texts@{commit}/{name}",
        }[kind]
        load_corpus(streamed(tmp_path, url))
        if (kind, name) == ("web", "a.parquet"):  # It sends no parts, so the run finds it later.
            load_corpus(streamed(tmp_path, url, text_field="body"))
            return
        with pytest.raises(ValueError) as error:
            load_corpus(streamed(tmp_path, url, text_field="body"))
    fields = "has the columns ['id', 'text']" if "parquet" in name else "has the fields ['text']"
    assert name in str(error.value) and fields in str(error.value)
    assert "set data.text_field to the" in str(error.value)
