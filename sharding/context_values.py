"""Values that hold for everything that is traced within a `with` block."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def bound(variable: contextvars.ContextVar, value: T) -> Iterator[T]:
    """Give a variable a value within the block, and yield the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
