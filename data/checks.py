"""What the sections of the config check of their fields."""

from typing import TypeGuard


def require(holds: object, message: str) -> None:
    """Raises a ValueError that says `message` unless `holds` is true."""
    if not holds:
        raise ValueError(message)


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether the value is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether the value is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
