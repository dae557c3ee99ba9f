"""Shared code of the commands in this folder: logging, and exit codes after errors."""

import logging
from collections.abc import Callable

import jax

from untrusted.commands import refuses_bad_input


@refuses_bad_input()
def run(command: Callable[[], object]) -> int:
    """Run a command; return the exit code: 0, or 2 after an error, which it prints to stderr."""
    jax.config.update("jax_platforms", "cpu")  # An accelerator would only be used for its memory.
    logging.basicConfig(format="%(message)s", force=True)
    logging.getLogger("convert").setLevel(logging.INFO)
    command()
    return 0
