"""Standard output and error, whose reader may leave and whose disk may be full.

A log may be on a full disk, the program that reads it may have ended, and a daemon may start a run
without any output (`>&-`). Each program reacts in one of two ways:

    EndingStream     for commands that print a result: if nobody can read it, they end
    protect_output   for runs and servers, which nothing of this kind may stop: the text is dropped

The second matters most when a run ends: an error while printing the reason would keep the process
alive while its peers wait for it.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

#: Exit code of a command whose reader has left: a shell's code of programs that SIGPIPE has ended.
READER_LEFT = 128 + 13


class SafeStream:
    """A text stream that ignores errors of writing and flushing, and drops the affected text."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; return its length."""
        with self._handling_errors():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        with self._handling_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _handling_errors(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.suppress(OSError, ValueError)


class EndingStream(SafeStream):
    """A text stream that ends the process if it cannot be written.

    It raises SystemExit, and not an OSError, which a command would report as an error of its input.
    """

    @contextlib.contextmanager
    def _handling_errors(self):
        try:
            yield
        except BrokenPipeError:
            _discard(self._stream)
            raise SystemExit(READER_LEFT) from None
        except OSError as error:
            _discard(self._stream)
            print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


def flush_or_discard(stream: TextIO) -> None:
    """Flush a stream; if that fails, send the rest of its text to /dev/null."""
    try:
        stream.flush()
    except OSError:
        _discard(stream)


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


def _discard(stream: Any) -> None:
    """Send the rest of a stream to /dev/null, because Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
