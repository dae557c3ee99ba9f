"""Errors of the file system while a checkpoint is saved or read, and their reasons in a few words.

A file that is missing, truncated or altered is damage. An error while it is read is not: it says
nothing about the content, and the next attempt may find the file intact. This holds for a server
that does not answer (EIO, ESTALE, ETIMEDOUT), and for a permission that was lost because a ticket
expired (EACCES). Such reads are repeated, and then end in a `ReadError`:

    ENOENT, ENOTDIR …    the file is not there         -> damage: use an older checkpoint
    any other error      nothing is known about it     -> wait, read again, then ReadError
"""

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

#: Errors that mean that the file system failed. TensorStore reports such failures as ValueError.
#: Other exceptions are bugs and are raised.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)

#: Seconds to wait before each further attempt to read a file.
DELAYS_S = (0.5, 1.0, 2.0)

#: Errors which mean that no file has this path. The last two are due to names in a damaged list.
_NOT_A_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,  # a socket
    errno.ENAMETOOLONG,
    errno.EILSEQ,
)


class SaveError(OSError):
    """A checkpoint could not be saved; the message names the checkpoint and the reason."""


class ReadError(OSError):
    """A file of a checkpoint could not be read, and may be intact; the message names the file.

    It has no `errno`, so that the exit code of the run makes launchers restart it, even if the
    reason is a missing permission; see `distributed.messages.may_pass`.
    """


def read_patiently(path: Path, read: Callable[[], T]) -> T:
    """Read something, and try again after errors that may pass.

    Args:
        path: file or directory that is read, for the message.
        read: reads it. It is called up to `len(DELAYS_S) + 1` times.

    Raises:
        ReadError: the last attempt failed, too.
        OSError: there is no such file.
    """
    for delay_s in (*DELAYS_S, None):
        try:
            return read()
        except Exception as error:  # Orbax and TensorStore have no common type for such errors.
            code = _error_code(error)
            if code is None or code in _NOT_A_FILE:
                raise
            if delay_s is None:
                raise ReadError(
                    f"{_file_of(error) or path} cannot be read ({os.strerror(code)}), even after "
                    f"{len(DELAYS_S) + 1} attempts; check the file system, and start again"
                ) from error
        time.sleep(delay_s)
    raise AssertionError  # The loop ends with a result or an exception.


def is_file(path: Path) -> bool:
    """Return whether there is a regular file.

    Unlike `Path.is_file`, which in some versions of Python answers False after any error.

    Raises:
        ReadError: this cannot be found out.
    """
    try:
        return stat.S_ISREG(read_patiently(path, lambda: os.stat(path)).st_mode)
    except ReadError:
        raise
    except (OSError, ValueError):  # A damaged list may have names that are too long.
        return False


def first_error(written: Sequence[Any]) -> Exception | None:
    """Wait for all futures, and return the first exception, or None if all succeeded."""
    errors = []
    for future in written:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    return errors[0] if errors else None


def reason_of(error: BaseException) -> str:
    """Return the reason for a failed write, in a few words on one line."""
    code = _error_code(error)
    if code is not None:
        return os.strerror(code)
    return (str(error) or type(error).__name__).splitlines()[0]


def _error_code(error: BaseException | None) -> int | None:
    """Return the `errno` of a failed operation on a file; None for other errors."""
    while error is not None:
        code = re.search(r"os_error_code='(\d+)'", str(error))  # in TensorStore's messages
        if code:
            return int(code[1])
        if isinstance(error, OSError):
            return error.errno
        error = error.__cause__
    return None


def _file_of(error: BaseException | None) -> str | None:
    """Return the file that could not be read, if the error names it."""
    while error is not None:
        files = re.findall(r'"(/[^"]+)"', str(error))  # in TensorStore's messages
        if files:
            return files[-1]  # the innermost one
        if isinstance(error, OSError) and error.filename is not None:
            return os.fsdecode(error.filename)
        error = error.__cause__
    return None
