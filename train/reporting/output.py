"""Standard output and error that cannot fail.

A log may be on a full disk, and the program that reads it may have ended. Neither may stop a run.
This matters most when a run ends: an error while printing the reason would keep the process alive
while its peers wait for it.
"""

import contextlib
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


def protect_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that cannot fail."""
    if not isinstance(sys.stdout, SafeStream):
        sys.stdout = SafeStream(sys.stdout)  # pyright: ignore[reportAttributeAccessIssue]
        sys.stderr = SafeStream(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
