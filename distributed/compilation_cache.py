"""The cache of compiled programs, whose entries are verified before they are loaded.

A cached program is code. JAX's own cache trusts its files, and never replaces a truncated one.
Here each entry has a digest, a damaged entry is compiled and written again, and the directory is
used only if nobody else can write to it.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from untrusted.cached import others_may_write, read_cached, write_cached
from untrusted.files import make_private_directory

_log = logging.getLogger(__name__)
_paused: list[bool] = []  # not empty within `without_compilation_cache`


class VerifiedCache(CacheInterface):
    """Compiled programs in files that carry digests."""

    def __init__(self, directory: Path):
        self._path = directory  # pyright: ignore[reportIncompatibleVariableOverride]

    def get(self, key: str) -> bytes | None:
        """Return the program of a key, or None if it is absent or damaged."""
        return None if _paused else read_cached(self._file(key))

    def put(self, key: str, value: bytes) -> None:
        """Store the program of a key."""
        if _paused:
            return
        file = self._file(key)
        try:
            write_cached(file, value)
        except FileNotFoundError:
            # Another process that compiles the same program uses the same temporary file, and has
            # renamed it first.
            if not file.exists():
                raise

    def _file(self, key: str) -> Path:
        return self._path / f"{key}.program"


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Neither read nor write the cache within the block.

    JAX could store a program for absent GPUs, but not load it again.
    """
    _paused.append(True)
    try:
        yield
    finally:
        _paused.pop()


def use_compilation_cache(directory: Path) -> None:
    """Keep compiled programs in a directory, so that the next start does not compile them again.

    If the directory cannot be created or others may write to it, the run logs a warning and
    continues without a cache.

    Args:
        directory: directory, which is created for this user alone.
    """
    try:
        make_private_directory(directory)
        is_shared = others_may_write(directory)
    except OSError as error:
        _log.warning("%s cannot be used, compiled programs are not cached: %s", directory, error)
        return
    if is_shared:
        _log.warning(
            "%s is not used, because others may write to it and cached programs are code; "
            "chmod go-w it, or choose another cache directory",
            directory,
        )
        return
    compilation_cache.get_file_cache = _get_verified_cache
    jax.config.update("jax_compilation_cache_dir", str(directory))


def _get_verified_cache(path: str) -> tuple[CacheInterface, str]:
    return VerifiedCache(Path(path)), path
