"""What the sections of the config check of their fields, and how messages name what was found."""

import dataclasses
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard


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


def listed(found: Sequence[str], most: int = 3) -> str:
    """Returns the first of what was found, and how many more there are."""
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def check_types(
    section: type,
    values: dict[str, Any],
    name: str,
    *,
    but: Collection[str] = (),
    tuples: bool = False,
) -> None:
    """Refuses values of other types than the fields of a dataclass; whole numbers become floats.

    Looked at are fields of numbers, texts and truth values.

    Args:
        values: Field -> value; the floats are put in here.
        name: What the message calls the section, such as "model".
        but: Fields that are not looked at.
        tuples: Whether fields of any number of such values are looked at too.

    Raises:
        ValueError: The message names key, value and type.
    """
    for field in dataclasses.fields(section):
        if field.name not in values or field.name in but:
            continue
        value, of = values[field.name], field.type
        parts = typing.get_args(of)
        kinds: tuple[Any, ...] = parts if isinstance(of, types.UnionType) else (of,)
        if float in kinds and type(value) is int:
            values[field.name] = value = float(value)
        # Other annotations than these are the section's own to check.
        if {*kinds} <= {int, float, str, bool, type(None)} and type(value) not in kinds:
            kind = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(f"{name}.{field.name}={value!r} must be of type {kind}")
        if tuples and typing.get_origin(of) is tuple and parts[1:] == (...,):
            kind = parts[0]
            fitting = {kind, int} if kind is float else {kind}
            if not isinstance(value, list | tuple) or not {*map(type, value)} <= fitting:
                raise ValueError(
                    f"{name}.{field.name}={value!r} must be values of type {kind.__name__} with "
                    "commas between them"
                )
