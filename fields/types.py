"""Checks values against the annotated types of a dataclass's fields, and the range of numbers."""

import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Any

from fields.field import bound_of
from fields.numbers import exponent_hint, number_problem, shown


def check_no_nul(name: str, value: Any) -> None:
    """Check that a string, or each string of a list or tuple, has no NUL character.

    No path may contain one; the errors of the operating system would not say which key it is.

    Args:
        name: name of the key or option in the message.
        value: value; anything but strings passes.

    Raises:
        ValueError: The value has a NUL character.
    """
    parts = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(part, str) and "\0" in part for part in parts):
        raise ValueError(f"{name}={value!r} must not contain a NUL character (\\0); remove it")


def check_types(
    section: type,
    values: dict[str, Any],
    name: str,
    *,
    exclude: Collection[str] = (),
    tuples: bool = False,
) -> None:
    """Check values against the annotated field types of a dataclass.

    Only fields annotated as int, float, str or bool (or a union of these with None) are checked.
    An int given for a float field is converted in place. Numbers of any field must be in the range
    of `fields.numbers`, unless the field declares a larger bound.

    Args:
        section: dataclass.
        values: field name -> value. Modified in place: ints of float fields become floats.
        name: name of the section in messages, such as "model".
        exclude: names of fields that are not checked.
        tuples: whether to check fields of type `tuple[X, ...]` too.

    Raises:
        ValueError: A value has the wrong type or is out of range, or a string has a NUL character;
            the message names the key, the value, and the type or the range.
    """
    for field in dataclasses.fields(section):
        if field.name not in values or field.name in exclude:
            continue
        value = values[field.name]
        check_no_nul(f"{name}.{field.name}", value)
        of = field.type
        parts = typing.get_args(of)
        kinds: tuple[Any, ...] = parts if isinstance(of, types.UnionType) else (of,)
        is_float = float in (*kinds, *parts)
        if problem := number_problem(value, is_float=is_float, max_int=bound_of(field)):
            raise ValueError(f"{name}.{field.name}={shown(value)} {problem}")
        if float in kinds and type(value) is int:
            values[field.name] = value = float(value)
        # Fields with any other annotation are checked by the section itself.
        if {*kinds} <= {int, float, str, bool, type(None)} and type(value) not in kinds:
            kind = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            is_number = {*kinds} & {int, float}
            hint = exponent_hint(value, is_float=float in kinds) if is_number else ""
            raise ValueError(f"{name}.{field.name}={shown(value)} must be of type {kind}{hint}")
        if tuples and typing.get_origin(of) is tuple and parts[1:] == (...,):
            kind = parts[0]
            fitting = {kind, int} if kind is float else {kind}
            if not isinstance(value, list | tuple) or not {*map(type, value)} <= fitting:
                raise ValueError(
                    f"{name}.{field.name}={shown(value)} must be a list of values of type "
                    f"{kind.__name__} (on the command line, separated by commas)"
                    f"{exponent_hint(value, is_float=kind is float) if kind is not str else ''}"
                )
