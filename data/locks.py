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

    Raises:
        ValueError: There is something other than a file in the place of the lock.
    """
    file = Path(f"{path}.lock")
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise ValueError(
            f"{file} is not a regular file, and links are not followed; delete it, or set "
            "data.cache_dir to another directory"
        )
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=_SILENT_S)
    except filelock.Timeout:
        _log.warning("waiting for another process, which is making %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
