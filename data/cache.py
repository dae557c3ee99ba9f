"""The cache directory and the arrays in it."""

import io
import logging
from pathlib import Path

import numpy as np

from data.config import DataConfig
from untrusted.cached import read_cached, write_cached
from untrusted.files import make_private_directory

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
