"""The cache directory: locks, so that only one process or thread builds a file, and arrays."""

import contextlib
import io
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.config import DataConfig
from untrusted.cached import read_cached, write_cached
from untrusted.files import make_private_directory, open_in_place, try_lock

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

    Unlike a workdir's lock, it names no holder, waits for ever, and its file stays.

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
        silent_until_s = time.monotonic() + _SILENT_S
        has_warned = False
        while not try_lock(stream, file):
            if not has_warned and time.monotonic() > silent_until_s:
                _log.warning("waiting for another process, which is making %s", path)
                has_warned = True
            time.sleep(_POLL_S)
        yield


def read_array(path: Path) -> np.ndarray | None:
    """Read an array written by `write_array`; None if there is no such file or it is damaged."""
    content = read_cached(path)
    if content is None:
        return None
    return np.load(io.BytesIO(content), allow_pickle=False)


def write_array(path: Path, values: np.ndarray) -> None:
    """Write an array atomically. Call this inside `locked`.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    content = io.BytesIO()
    np.save(content, values, allow_pickle=False)
    write_cached(path, content.getvalue())
