"""A failed save is one line of ours: what Orbax and asyncio print about it besides is kept back."""

import functools
import logging
import sys
from typing import Any


@functools.cache
def keep_quiet() -> None:
    """Drops, from now on, the tracebacks of writes that failed in Orbax's threads.

    Their errors reach `Checkpoints` all the same. Besides, each array that was written beside the
    one that failed would say that nobody waited for it.
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
