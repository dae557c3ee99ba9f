"""Makes reads fail, for tests: our own by a patch, those of TensorStore by a limit."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """Let every attempt to open a file fail with EMFILE, also those of TensorStore."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
