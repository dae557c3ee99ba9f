"""Arrays kept in the cache directory: found out once, by whichever process comes first."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock
import numpy as np


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes and threads that take the same array out of the block."""
    with filelock.FileLock(f"{path}.lock"):
        yield


def read_array(path: Path) -> np.ndarray | None:
    """Returns the array that `write_array` wrote; None if there is none, or it was damaged."""
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        return None


def write_array(path: Path, values: np.ndarray) -> None:
    """Writes an array, whole or not at all; under `locked`.

    Raises:
        OSError: It cannot be written.
    """
    new = path.with_suffix(".tmp.npy")
    try:
        np.save(new, values)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
