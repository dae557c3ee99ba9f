"""Standard output and error that cannot fail.

A log may be on a full disk, the program that reads it may have ended, and a daemon may start a run
without any output (`>&-`). None of these may stop a run. This matters most when a run ends: an
error while printing the reason would keep the process alive while its peers wait for it.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO


class SafeStream:
    """A text stream that ignores errors of writing and flushing, and drops the affected text.

    Args:
        stream: The stream to write to.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; return its length."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_report(text: str) -> None:
    """Print the result of a command; if its reader, such as `head`, has left, drop the rest."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes its output once more at exit, which must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that are closed.

    Call this before any file is opened. Otherwise a file that is opened later, such as a
    checkpoint, would get the descriptor of a standard stream, and a library that prints would write
    into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "the lowest free descriptor is opened first"
            os.set_inheritable(opened, True)  # for child processes, which print too
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def protect_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that cannot fail, even if they are missing.

    Call this before any file is opened; see `open_missing_streams`.
    """
    open_missing_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))
