"""Opens and writes files in directories that may come from a stranger.

A received directory may contain symbolic links to private files, named pipes that block whoever
opens them, or sparse files that claim to have gigabytes. The functions here refuse all three:

    reading    the file must be a regular file, of limited size, and inside its directory
    writing    a link in the place of a new file is replaced; a file in place must be no link

A model in the cache of the Hugging Face hub is a directory of links; links into the cache's `blobs`
are allowed:

    models--gpt2/snapshots/1f2e3d/config.json -> models--gpt2/blobs/a9b8c7
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from untrusted.outputs import check_new_directory

#: Maximum size of a file that is read as a whole, unless the caller allows more.
MAX_BYTES = 16 * 2**20

_log = logging.getLogger(__name__)


def check_link(path: Path, directory: Path) -> None:
    """Check that a path in a directory does not leave that directory through a symbolic link.

    Args:
        path: path in the directory; nothing needs to exist there.
        directory: directory; it may itself be a link, because the user named it.

    Raises:
        ValueError: A link in `path` leads out of `directory`, or in a circle.
        OSError: A link cannot be read, so it is unknown where it leads.
    """
    real = _resolve(path)
    base = _resolve(directory)
    roots = [base]
    if base.parent.name == "snapshots":
        roots.append(base.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{path} is a link to {real}, outside {directory}; if you trust it, replace the link "
            "by a copy of the file, otherwise delete it"
        )


def _resolve(path: Path) -> Path:
    """Return a path without links.

    `Path.resolve` returns a link that it cannot read unchanged, as if it were a file.
    """
    try:
        return Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):
        return Path(os.path.realpath(path))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} cannot be resolved: {error}; remove the link") from None
        raise


def check_links(directory: Path) -> None:
    """Check that neither a directory nor its immediate subfolders have links that lead outside.

    Args:
        directory: directory, which need not exist.

    Raises:
        ValueError: A link leads out of the directory; the message names it.
    """
    if not directory.is_dir():
        return
    for path in [*directory.iterdir(), *directory.glob("*/*")]:
        if path.is_symlink():
            check_link(path, directory)


def check_tree(directory: Path, within: Path) -> None:
    """Check that neither a directory nor anything in it is a link that leads outside.

    Args:
        within: directory that all links must stay in.

    Raises:
        ValueError: A link leads out of `within`; the message names it.
    """
    check_link(directory, within)
    for path in directory.rglob("*"):
        if path.is_symlink():
            check_link(path, within)


def open_regular(path: Path, *, within: Path | None = None) -> io.BufferedReader:
    """Open a regular file for reading in binary mode, without blocking.

    Args:
        within: directory that the file must be in, even if `path` is a link.

    Raises:
        ValueError: There is something other than a regular file at `path`, such as a named pipe,
            or the file is not in `within`.
        OSError: The file cannot be opened.
    """
    if within is not None:
        check_link(path, within)
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(descriptor, path)
        return io.BufferedReader(NamedFile(descriptor, path, "r"))
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, *, within: Path | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a small regular file.

    Args:
        max_bytes: maximum size of the file.

    Raises:
        ValueError: See `open_regular`; or the file is too large.
        OSError: The file cannot be read.
    """
    with open_regular(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if size > max_bytes or len(content) > max_bytes:
        raise ValueError(
            f"{path} is too large: it has {max(size, len(content)):,} bytes, but at most "
            f"{max_bytes:,} are allowed for such a file"
        )
    return content


def digest_of(path: Path, *, within: Path | None = None) -> str:
    """Return the SHA-256 of the content of a regular file, in hex.

    Raises:
        ValueError: See `open_regular`.
        OSError: The file cannot be read.
    """
    with open_regular(path, within=within) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of(file: str | Path | int) -> tuple[int, int]:
    """Return the size in bytes and the modification time in nanoseconds of a file.

    Args:
        file: path of the file, or the descriptor of an open file.

    Raises:
        OSError: There is no such file.
    """
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def read_text(path: Path, *, within: Path | None = None, max_bytes: int = MAX_BYTES) -> str:
    """Read a small regular file of UTF-8 text; see `read_bytes`.

    Raises:
        ValueError: See `read_bytes`; or the content is not UTF-8.
        OSError: The file cannot be read.
    """
    content = read_bytes(path, within=within, max_bytes=max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} cannot be read: it is not text (byte {error.start} is not UTF-8)"
        ) from None


def open_new(path: Path) -> BinaryIO:
    """Create a file for writing; whatever was at `path`, such as a link, is removed first.

    Raises:
        OSError: The file cannot be created.
    """
    path.unlink(missing_ok=True)  # Not the target, if it is a link.
    # O_EXCL also refuses a link that somebody put there in the meantime.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return io.BufferedWriter(NamedFile(os.open(path, flags, 0o666), path, "w"))


def open_in_place(path: Path, flags: int) -> int:
    """Open or create a regular file without following a link, and return its descriptor.

    Args:
        flags: flags of `os.open`, without `os.O_TRUNC`, which would empty a refused file.

    Raises:
        ValueError: There is a symbolic or hard link, or no regular file, at `path`.
        OSError: The file cannot be opened.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # ENXIO: a named pipe that nobody reads.
            raise ValueError(f"{path} is not a regular file; replace it by one") from None
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(
            f"{path} is a symbolic link, which is not followed; delete it, or choose another "
            "directory"
        ) from None
    try:
        _check_regular(descriptor, path)
        num_names = os.fstat(descriptor).st_nlink  # 0 if another process has just deleted it
        if num_names > 1:
            raise ValueError(
                f"{path} is one of {num_names} names (hard links) of a file that would change "
                "under all of them; replace it by a copy, or delete it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(file: IO[Any], path: Path) -> bool:
    """Lock an open file, and return True, or False if another process has locked it.

    The lock is `flock`'s, which the kernel releases when the process ends for any reason. On a file
    system without `flock` this returns True after a warning.

    The package `filelock` is not used, because its versions 3.16 and 4.2

    - truncate the file at every attempt to lock it, so a waiting process would erase its content,
      or the content of another file if the lock is a hard link to it;
    - raise NotImplementedError on a file system without flock, or lock by the existence of the file
      instead: if a process on another host is killed, its file stays and blocks the others.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        _log.warning("%s cannot be locked (%s): do not start a second run there", path, error)
    return True


def temporary_of(path: Path) -> Path:
    """Return the path of the file that `write_with` writes before it renames it to `path`."""
    return path.with_name(f".{path.name}.tmp")


def write_with(
    path: Path, write: Callable[[BinaryIO], object], *, reaches_disk: bool = False
) -> None:
    """Write a file atomically: it appears complete, or not at all.

    Args:
        path: path of the file; a link there is replaced, not followed.
        write: writes the content to the given file.
        reaches_disk: whether to wait until the content is on the disk.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    temporary = temporary_of(path)
    try:
        with open_new(temporary) as file:
            write(file)
            if reaches_disk:
                file.flush()
                with naming(temporary):
                    os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, reaches_disk: bool = False) -> None:
    """Write a UTF-8 text file atomically; see `write_with`."""
    write_with(path, lambda file: file.write(text.encode("utf-8")), reaches_disk=reaches_disk)


def copy_file(
    source: Path, target: Path, *, within: Path | None = None, max_bytes: int = MAX_BYTES
) -> None:
    """Copy a regular file atomically.

    Args:
        within: directory that the source must be in, even if it is a link.
        max_bytes: maximum size of the file; a sparse file becomes as large as it claims to be.

    Raises:
        ValueError: See `read_bytes`.
        OSError: The file cannot be copied; nothing is left behind.
    """
    content = read_bytes(source, within=within, max_bytes=max_bytes)
    write_with(target, lambda file: file.write(content))


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError(f"{path} is not a regular file; replace it by one")


def remove(path: Path) -> None:
    """Remove whatever is at a path: a file, a link (not its target), or a directory.

    Raises:
        OSError: It cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_private_directory(path: Path) -> None:
    """Create a directory, such as a cache, that only this user may enter.

    Args:
        path: directory. It and its parents are created if they do not exist; permissions of
            existing directories are left as they are.

    Raises:
        OSError: The directory cannot be created.
    """
    # mkdir(parents=True) would create the parents with the default permissions: the first
    # directory inside a cache would then create the cache itself for everyone to read.
    for directory in reversed([path, *path.parents]):
        directory.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Create a directory atomically: it appears complete, or not at all if there is an error.

    Args:
        path: directory to create; it may exist if it is empty.

    Yields:
        A temporary directory to write to, which is renamed to `path` at the end.

    Raises:
        ValueError: There is a file, or a directory that is not empty, at `path`.
    """
    check_new_directory(path)
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to an OSError of the block that names no file.

    Python names the file in errors of opening it, but not in later ones: a disk that fails while a
    file is read raises `[Errno 5] Input/output error`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


class NamedFile(io.FileIO):
    """An open file without a buffer, whose errors have its path.

    Args:
        descriptor: file descriptor, which is closed with this file.
        mode: "r", "w" or "r+"; nothing is truncated.
    """

    def __init__(self, descriptor: int, path: Path, mode: str):
        super().__init__(descriptor, mode)
        self._path = path

    def read(self, size: int | None = -1) -> Any:
        """Read at most `size` bytes, or the rest of the file."""
        with naming(self._path):
            return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any) -> Any:
        """Read into a buffer; return the number of bytes."""
        with naming(self._path):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        """Read the rest of the file."""
        with naming(self._path):
            return super().readall()

    def write(self, content: Any) -> Any:
        """Write bytes; return how many were written."""
        with naming(self._path):
            return super().write(content)

    def close(self) -> None:
        """Close the file; a network file system may write buffered data only now."""
        with naming(self._path):
            super().close()
