"""Suppresses the output of Orbax and asyncio about failed saves; `Checkpoints` logs them itself."""

import functools
import logging
import sys
from typing import Any


@functools.cache
def keep_quiet() -> None:
    """Suppress the tracebacks of writes that fail in Orbax's threads, from now on.

    `Checkpoints` still receives these errors and logs each failed save in one line. Without this
    function, Orbax prints a traceback, and asyncio reports every other array of the same save as
    an exception that was never retrieved.
    """
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in str(record.msg))
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook = hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "exception was never retrieved" not in message or "orbax" not in message
