"""Cache files with the SHA-256 of their content, so that damage is detected and the file rebuilt.

Most files contain the digest, followed by the content. A file that other programs read too, such as
a tokenizer.json, contains only the content; its digest is in a second file next to it, with the
suffix `.sha256`. Processes that build the same file wait for each other's lock.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from untrusted.files import (
    make_private_directory,
    open_in_place,
    open_regular,
    remove,
    temporary_of,
    try_lock,
    write_with,
)

_DIGEST_BYTES = 32

#: Seconds of waiting after which a message is logged.
_SILENT_S = 2.0
_POLL_S = 0.05

_log = logging.getLogger(__name__)


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


def write_cached(path: Path, content: bytes, *, plain: bool = False) -> None:
    """Write a cache file atomically.

    Args:
        path: path of the file; a directory there, which cannot be a cache file, is removed.
        plain: whether the digest is in a file of its own.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    digest = hashlib.sha256(content).digest()
    if not plain:
        _write(path, digest + content)
        return
    _write(path, content)
    _write(_digest_file(path), digest)


def read_cached(path: Path, *, plain: bool = False) -> bytes | None:
    """Return the content of a cache file; None if it is absent, or damaged, which is logged."""
    try:
        content = _read(path)
        if plain:
            digest = _read(_digest_file(path))
        else:
            digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read, it is rebuilt: %s", path, error)
        return None
    if hashlib.sha256(content).digest() != digest:
        _log.warning("%s is damaged (its SHA-256 differs), it is rebuilt", path)
        return None
    return content


def others_may_write(path: Path) -> bool:
    """Return whether users other than this one own a directory or may write to it."""
    status = path.stat()
    return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & 0o022)


def _write(path: Path, content: bytes) -> None:
    for place in (path, temporary_of(path)):
        if place.is_dir():
            remove(place)
    write_with(path, lambda file: file.write(content))


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
