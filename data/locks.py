"""Locks of files in the cache directory, so that only one process or thread builds a file."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import filelock

#: Seconds of waiting after which a message is logged.
_SILENT_S = 2.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a cached file or directory, and hold it for the duration of the block.

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
