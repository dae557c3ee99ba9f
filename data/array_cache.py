"""Arrays in the cache directory, computed once by whichever process gets there first."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock
import numpy as np


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a cached array, so that one process or thread at a time runs the block.

    Args:
        path: Path of the array; the lock file is next to it, with `.lock` appended.

    Yields:
        Nothing.
    """
    with filelock.FileLock(f"{path}.lock"):
        yield


def read_array(path: Path) -> np.ndarray | None:
    """Read an array written by `write_array`.

    Args:
        path: Path of the array.

    Returns:
        The array, or None if the file does not exist or is damaged.
    """
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        return None


def write_array(path: Path, values: np.ndarray) -> None:
    """Write an array atomically. Call this inside `locked`.

    Args:
        path: Path of the array.
        values: The array.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    new = path.with_suffix(".tmp.npy")
    try:
        np.save(new, values)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
