"""Data at URLs: in fsspec's file system in memory, and on a web server."""

import contextlib
import gzip
import io
import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from data.config import DataConfig
from data.corpus import load_corpus, load_validation
from data.image_config import ImageConfig
from data.store_files import local_entry
from untrusted.stores import Store

TEXTS = [f"Sentence number {i} of a small text that is long enough.\n" * 5 for i in range(40)]


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


FILES = {
    "a.txt": "".join(TEXTS[:10]).encode(),
    "sub/b.txt": "".join(TEXTS[10:20]).encode(),
    "c.jsonl.gz": gzip.compress("\n".join(json.dumps({"text": t}) for t in TEXTS[20:30]).encode()),
    "d.parquet": parquet(TEXTS[30:]),
}


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Log nothing."""


@contextlib.contextmanager
def web_server(directory: Path) -> Iterator[str]:
    handler = partial(SilentHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def config(cache: Path, *paths: str, **fields) -> DataConfig:
    return DataConfig(
        name="text",
        paths=paths,
        tokenizer="bytes",
        sequence_length=32,
        global_batch_size=4,
        cache_dir=str(cache),
        **fields,
    )


@pytest.mark.parametrize("pattern", ["a.txt", "*.txt", "**/*.txt", "c.jsonl.gz", "d.parquet"])
def test_text_equals_that_of_local_files(pattern, memory_store, tmp_path):
    for name, content in FILES.items():
        memory_store.pipe(f"/bucket/{name}", content)
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(content)
    local = load_corpus(config(tmp_path / "a", f"{tmp_path}/files/{pattern}"))
    remote = load_corpus(config(tmp_path / "b", f"memory://bucket/{pattern}"))
    assert remote.fingerprint == local.fingerprint and len(remote.train) == len(local.train) > 0


def test_validation_sets_are_read_alone(memory_store, tmp_path):
    memory_store.pipe("/bucket/valid.txt", FILES["a.txt"])
    data = config(tmp_path, "memory://none/a.txt", validation_paths=("v=memory://bucket/*.txt",))
    assert [*load_validation(data, ImageConfig(), ()).validation_sets] == ["v"]


def test_folder_of_images_is_copied_with_its_classes(memory_store, tmp_path):
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for i in range(6):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(file, "png")
            memory_store.pipe(f"/photos/{label}/{i}.png", file.getvalue())
    data = DataConfig(
        name="image_folder",
        objective="image_classification",
        paths=("memory://photos",),
        global_batch_size=2,
        cache_dir=str(tmp_path),
        validation_fraction=0.3,
    )
    assert load_corpus(data, ImageConfig(size=8)).labels == ("cat", "dog")


def test_only_changed_files_are_transferred(memory_store, tmp_path, monkeypatch):
    downloads = []
    download = Store.download
    monkeypatch.setattr(
        Store,
        "download",
        lambda self, name, *rest: downloads.append(name) or download(self, name, *rest),
    )
    for name in ("a", "b", "c"):
        memory_store.pipe(f"/bucket/{name}.txt", name.encode())
    fetch = partial(local_entry, "data.paths", "memory://bucket/*.txt", tmp_path)
    folder = Path(fetch()).parent
    memory_store.pipe("/bucket/b.txt", b"changed")
    memory_store.rm("/bucket/c.txt")
    assert Path(fetch()).parent == folder
    assert sorted(downloads) == ["a.txt", "b.txt", "b.txt", "c.txt"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "a.txt": b"a",
        "b.txt": b"changed",
    }


def test_token_file_comes_with_its_index(memory_store, tmp_path):
    for name in ("t.bin", "t.idx", "other.bin"):
        memory_store.pipe(f"/bucket/{name}", b"x")
    file = Path(local_entry("data.paths", "memory://bucket/t.bin", tmp_path))
    assert sorted(path.name for path in file.parent.iterdir()) == ["t.bin", "t.idx"]


def test_file_of_a_web_server(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_bytes(FILES["a.txt"])
    with web_server(tmp_path / "files") as url:
        file = Path(local_entry("data.paths", f"{url}/a.txt?version=1", tmp_path / "cache"))
        assert file.name == "a.txt" and file.read_bytes() == FILES["a.txt"]
        with pytest.raises(ValueError, match=r"data\.paths: .*/none\.txt does not exist"):
            local_entry("data.paths", f"{url}/none.txt", tmp_path / "cache")
    with pytest.raises(ConnectionError, match=r"data\.paths: http.* cannot be reached"):
        local_entry("data.paths", f"{url}/a.txt", tmp_path / "cache")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/none.txt", "no file matches memory://bucket/none.txt; correct the URL"),
        ("memory://bucket/*.csv", "it has 1 others, such as a.txt"),
        ("memory://*.txt", "no bucket in front of the glob"),
        ("nowhere://bucket/a.txt", "a URL of an unknown scheme"),
        ("zip://a.txt::s3://bucket/a.zip", "is a URL"),
        ("gs:/bucket/a.txt", "is a URL"),
    ],
)
def test_url_without_files_is_refused(url, message, memory_store, tmp_path):
    memory_store.pipe("/bucket/a.txt", b"x")
    with pytest.raises(ValueError, match=r"data\.paths") as raised:
        load_corpus(config(tmp_path, url))
    assert message in str(raised.value)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_missing_package_is_named(scheme, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"run 'pip install {package}'"):
        Store(f"{scheme}://bucket/a")
