"""data.verify: changes of files that keep their sizes and times are detected on request."""

import os
from pathlib import Path

import pytest

from data.text.text_corpus import load_text
from tests.data.corpora import documents, jsonl_config
from tests.data.images.pictures import encoded, folder, plain, write_classes


def replace(file: Path, content: bytes) -> None:
    """Replace the content of a file, which keeps its size and its modification time."""
    status = file.stat()
    assert status.st_size == len(content)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("verify, is_noticed", [("times", False), ("full", True)])
def test_text_that_keeps_size_and_time(verify, is_noticed, tmp_path):
    config = jsonl_config(tmp_path, documents(), verify=verify)
    first = load_text(config)
    assert load_text(config).fingerprint == first.fingerprint
    (file,) = map(Path, config.paths)
    replace(file, file.read_bytes().replace(b"1", b"2"))
    assert (load_text(config).fingerprint != first.fingerprint) == is_noticed


@pytest.mark.parametrize("verify, is_noticed", [("times", False), ("full", True)])
def test_images_that_keep_size_and_time(verify, is_noticed, tmp_path):
    write_classes(tmp_path / "i", "ab")
    first = folder(tmp_path, tmp_path / "i", verify=verify)
    again = folder(tmp_path, tmp_path / "i", verify=verify)
    assert (again.fingerprint, again.contents) == (first.fingerprint, first.contents)
    file = tmp_path / "i" / "a" / "1.png"
    replace(file, encoded(plain(99), "png"))
    changed = folder(tmp_path, tmp_path / "i", verify=verify)
    assert changed.fingerprint == first.fingerprint
    assert (changed.contents != first.contents) == is_noticed
