"""Shared code of the commands in this folder: logging, and exit codes after errors."""

import logging
import sys
from collections.abc import Callable

import jax

from untrusted.messages import sentence_of


def run(command: Callable[[], object]) -> int:
    """Run a command; return the exit code: 0, or 2 after an error, which it prints to stderr."""
    jax.config.update("jax_platforms", "cpu")  # An accelerator would only be used for its memory.
    logging.basicConfig(format="%(message)s", force=True)
    logging.getLogger("convert").setLevel(logging.INFO)
    try:
        command()
    except (ValueError, OSError) as error:
        print(f"error: {sentence_of(error)}", file=sys.stderr)
        return 2
    return 0
