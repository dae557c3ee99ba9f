"""Arrays in the cache directory, computed only once even if several processes need them."""

import io
from pathlib import Path

import numpy as np

from untrusted.cached import read_cached, write_cached


def read_array(path: Path) -> np.ndarray | None:
    """Read an array written by `write_array`.

    Returns:
        The array, or None if the file does not exist or is damaged.
    """
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
