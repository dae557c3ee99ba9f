"""Errors of failed saves: which exceptions count as one, and the reason in a few words."""

import os
import re
from collections.abc import Sequence
from typing import Any

#: Errors that mean that the file system failed. TensorStore reports such failures as ValueError.
#: Other exceptions are bugs and are raised.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)


class SaveError(OSError):
    """A checkpoint could not be saved; the message names the checkpoint and the reason."""


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
    code = re.search(r"os_error_code='(\d+)'", str(error))  # in TensorStore's messages
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
