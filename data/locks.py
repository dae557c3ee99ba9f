"""The cache directory, and locks of files in it, so that only one process or thread builds a file.

The package `filelock` is not used here for the reasons that train/lifecycle/workdir_lock.py gives.
These locks differ from a workdir's: they name no holder, their waiters wait for ever, and their
files stay.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from data.config import DataConfig
from untrusted.files import make_private_directory, open_in_place

#: Seconds of waiting after which a message is logged.
_SILENT_S = 2.0
_POLL_S = 0.05

_log = logging.getLogger(__name__)


def make_cache(config: DataConfig) -> None:
    """Create the cache directory if it does not exist.

    Raises:
        ValueError: The directory cannot be created.
    """
    try:
        make_private_directory(config.cache_path)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={config.cache_dir!r}: {config.cache_path} cannot be created "
            f"({error.strerror}); set data.cache_dir to a directory that you may write to"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a cached file or directory, and hold it for the duration of the block.

    The lock is `flock`'s, which the kernel releases when the process ends for any reason. On a file
    system without `flock` the block runs without a lock, after a warning.

    Args:
        path: path of the file; the lock file is next to it, with `.lock` appended. Its directory is
            created if it does not exist.

    Raises:
        ValueError: There is a link or something other than a file in the place of the lock.
        OSError: The lock file cannot be opened.
    """
    file = Path(f"{path}.lock")
    make_private_directory(file.parent)
    with os.fdopen(open_in_place(file, os.O_RDWR), "r+b") as stream:
        try:
            _lock(stream.fileno(), path)
        except OSError as error:
            _log.warning("%s cannot be locked (%s): do not start a second run now", file, error)
        yield


def _lock(descriptor: int, path: Path) -> None:
    """Lock a file, and log a message if this takes long."""
    deadline_s = time.monotonic() + _SILENT_S
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            time.sleep(_POLL_S)
    _log.warning("waiting for another process, which is making %s", path)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
