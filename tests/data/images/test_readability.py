"""The check that images can be read: it runs once per image, and its result is cached."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data.cache import read_array, write_array
from data.image_config import ImageConfig
from data.images import readability
from tests.data.images.pictures import (
    folder,
    write_classes,
    write_image,
)

SKIP = ImageConfig(on_broken="skip")


def test_intact_images_are_checked_once_until_they_change(tmp_path, monkeypatch):
    write_classes(tmp_path / "i", "ab", num_images=5)
    checked = []

    def counted(content):
        checked.append(content)
        return problem_of(content)

    problem_of = readability.problem_of
    monkeypatch.setattr(readability, "problem_of", counted)
    folder(tmp_path, tmp_path / "i")
    assert len(checked) == 10
    folder(tmp_path, tmp_path / "i")
    assert len(checked) == 10
    changed = tmp_path / "i" / "a" / "0.png"
    changed.write_bytes(changed.read_bytes())
    os.utime(changed, ns=(1, 1))
    write_image(tmp_path / "i" / "b" / "new.png", 77)
    folder(tmp_path, tmp_path / "i")
    assert len(checked) == 12
    changed.write_bytes(b"")
    with pytest.raises(ValueError, match=r"1 of 11 images cannot be used: .*0\.png"):
        folder(tmp_path, tmp_path / "i")
    assert len(checked) == 13
    # A damaged cache is built again.
    (cache,) = (tmp_path / "cache").glob("sound-images-*.array")
    cache.write_bytes(cache.read_bytes()[:50])
    changed.unlink()
    folder(tmp_path, tmp_path / "i")
    kept = read_array(cache)
    assert len(checked) == 23 and kept is not None and len(kept) == 10


def test_concurrent_processes_check_images_once(tmp_path, monkeypatch):
    write_classes(tmp_path / "i", "ab", num_images=20)
    checked = []
    problem_of = readability.problem_of
    monkeypatch.setattr(
        readability, "problem_of", lambda content: checked.append(1) or problem_of(content)
    )
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: folder(tmp_path, tmp_path / "i"), range(4)))
    assert len(checked) == 40
    assert len({corpus.fingerprint for corpus in found}) == 1


def test_failed_write_of_an_array_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npy"
    write_array(path, np.arange(3))

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_array(path, np.arange(4))
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]
    np.testing.assert_array_equal(read_array(path), np.arange(3))
    assert read_array(tmp_path / "b.npy") is None
