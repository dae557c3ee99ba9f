"""Directories that are created atomically."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Create a directory atomically: it appears complete, or not at all if there is an error.

    Args:
        path: The directory to create; it may exist if it is empty.

    Yields:
        A temporary directory to write to, which is renamed to `path` at the end.

    Raises:
        ValueError: There is a file, or a directory that is not empty, at `path`.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists and is not empty; choose another directory")
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
