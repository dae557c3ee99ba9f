"""Checks that values from JSON or YAML have the expected types."""

import types
import typing
from collections.abc import Mapping
from typing import Any

from untrusted.messages import shortened


def is_of(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, including the types of its items.

    For example, `is_of({"a": 1}, dict[str, int])` is true, and `is_of(True, int)` is false.

    Args:
        value: value that consists of dicts, lists, strings, numbers, bools and None.
        kind: any, None, a type, a union, `list[X]` or `dict[str, X]`. An int is also a float.
    """
    if kind is Any:
        return True
    if kind is None or kind is type(None):
        return value is None
    if isinstance(kind, types.UnionType):
        return any(is_of(value, each) for each in typing.get_args(kind))
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(is_of(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            is_of(key, parts[0]) and is_of(item, parts[1]) for key, item in value.items()
        )
    return type(value) is kind or (kind is float and type(value) is int)


def check(value: Any, kind: Any, where: object) -> None:
    """Check the type of a value; see `is_of`.

    Args:
        where: place of the value, for the message.

    Raises:
        ValueError: The value has another type.
    """
    if not is_of(value, kind):
        raise ValueError(f"{where} is {shortened(repr(value))}, but must be of type {_name(kind)}")


def check_fields(values: Mapping[str, Any], kinds: Mapping[str, Any], where: object) -> None:
    """Check the types of some values of an object.

    Args:
        values: object; other keys are not checked.
        kinds: key -> type. A key is required unless None is among its types.
        where: file of the object, for messages.

    Raises:
        ValueError: A key is missing, or its value has another type.
    """
    for name, kind in kinds.items():
        if name not in values and not is_of(None, kind):
            raise ValueError(f"{where} is damaged: it has no {name!r}")
        check(values.get(name), kind, f"{where}: {name}")


def _name(kind: Any) -> str:
    is_plain = isinstance(kind, type) and typing.get_origin(kind) is None
    return kind.__name__ if is_plain else str(kind).replace("typing.", "")
