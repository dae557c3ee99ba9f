"""Locks of files in the cache directory, so that one process or thread at a time makes a file."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import filelock

#: Seconds after which a log message says what is waited for.
_SILENT_S = 2.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a cached file or directory, and wait for whoever holds it.

    Args:
        path: Path of the file; the lock file is next to it, with `.lock` appended.

    Yields:
        Nothing.
    """
    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=_SILENT_S)
    except filelock.Timeout:
        _log.warning("waiting for another process, which is making %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
