"""Cache files with the SHA-256 of their content, so that damage is detected and the file rebuilt.

Most files contain the digest, followed by the content. A file that other programs read too, such as
a tokenizer.json, contains only the content; its digest is in a second file next to it, with the
suffix `.sha256`.
"""

import hashlib
import logging
import os
from pathlib import Path

from untrusted.files import open_regular, remove, temporary_of, write_with

_DIGEST_BYTES = 32

_log = logging.getLogger(__name__)


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
