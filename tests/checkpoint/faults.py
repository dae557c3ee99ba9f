"""Faults for tests: reads that fail, and arrays that are changed on purpose."""

import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorstore as ts

from untrusted import documents, files


def fail_to_read(
    monkeypatch: pytest.MonkeyPatch, path: Path, code: int, *, num_times: float = float("inf")
) -> None:
    """Let the first reads of a file, or of all files in a directory, fail with an `errno`."""
    open_regular = files.open_regular
    failed = []

    def open_or_fail(file: Path, **options):
        if file.is_relative_to(path) and len(failed) < num_times:
            failed.append(file)
            raise OSError(code, os.strerror(code))  # like an error of read(): it names no file
        return open_regular(file, **options)

    for module in (files, documents):
        monkeypatch.setattr(module, "open_regular", open_or_fail)


@contextlib.contextmanager
def no_files_can_be_opened() -> Iterator[None]:
    """Let every attempt to open a file fail with EMFILE, including attempts of TensorStore."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def edit_store(step: Path, key: str, edit: Callable[[bytes], bytes | None]) -> None:
    """Change or delete a value of the store that contains the arrays.

    `write_checksums` makes the checksums right afterwards.
    """
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{step}/state/"}}
    store = ts.KvStore.open(spec).result()
    store.write(key, edit(store.read(key).result().value)).result()


def edit_metadata(step: Path, array: str, **changes) -> None:
    """Change the zarr metadata of an array."""

    def edit(text: bytes) -> bytes:
        return json.dumps(json.loads(text) | changes).encode()

    edit_store(step, f"{array}/zarr.json", edit)


def edit_list(step: Path, **changes) -> None:
    """Change the list of arrays."""
    file = step / "state" / "_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
