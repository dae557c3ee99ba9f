"""The one check of a field's value: its annotated type, the range of numbers, its declaration."""

import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Any

from fields.field import Declaration, declaration_of
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
    section: type, values: dict[str, Any], name: str, *, exclude: Collection[str] = ()
) -> None:
    """Check the values of a dataclass's fields; see `check_value`.

    Args:
        section: dataclass.
        values: field name -> value. Modified in place: ints of float fields become floats.
        name: name of the section in messages, such as "model".
        exclude: names of fields that are not checked.

    Raises:
        ValueError: A value is not valid.
    """
    for field in dataclasses.fields(section):
        if field.name in values and field.name not in exclude:
            values[field.name] = check_value(field, values[field.name], f"{name}.{field.name}")


def check_value(field: dataclasses.Field, value: Any, key: str) -> Any:
    """Check a value of a field, and return it in the field's type.

    The type is checked if it is int, float, str or bool, or a union of these with None. Numbers of
    any field must be in the range of `fields.numbers`, unless the field declares a larger bound. A
    declared field has its own rule; the elements of any other `tuple[X, ...]` must be of type X.

    Args:
        field: field of a dataclass, with its annotation and perhaps a declaration.
        value: value. An int stands for a float, and in a declared field a list for a tuple.
        key: name of the field in messages, such as "model.dropout".

    Raises:
        ValueError: The value has the wrong type, is out of range or breaks the rule, or a string
            has a NUL character. The message names the key, the value, the rule and the remedy.
    """
    check_no_nul(key, value)
    declaration = declaration_of(field)
    of = field.type
    parts = typing.get_args(of)
    kinds: tuple[Any, ...] = parts if isinstance(of, types.UnionType) else (of,)
    is_float = float in (*kinds, *parts)
    max_int = None if declaration is None else declaration.le
    if problem := number_problem(value, is_float=is_float, max_int=max_int):
        raise ValueError(f"{key}={shown(value)} {problem}")
    if float in kinds and type(value) is int:
        value = float(value)
    if {*kinds} <= {int, float, str, bool, type(None)} and type(value) not in kinds:
        kind = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        is_number = {*kinds} & {int, float}
        hint = exponent_hint(value, is_float=float in kinds) if is_number else ""
        raise ValueError(
            f"{key}={shown(value)} must be of type {kind}{_example(field, declaration)}{hint}"
        )
    if declaration is None:
        _check_elements(field, value, key)
        return value
    if declaration.splits and isinstance(value, str | list | tuple):
        value = split_at_commas(value)
    if isinstance(value, list):
        value = tuple(value)
    if problem := declaration.problem(value):
        hint = exponent_hint(value) if declaration.has_numbers else ""
        raise ValueError(f"{key}={shown(value)} {problem}{hint}")
    return value


def split_at_commas(value: str | list | tuple) -> tuple:
    """Return the parts of a string, or of a list or tuple, without empty ones."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part for part in parts if part != "")


def _check_elements(field: dataclasses.Field, value: Any, key: str) -> None:
    """Check that the value of a field of type `tuple[X, ...]` is a list of X."""
    parts = typing.get_args(field.type)
    if typing.get_origin(field.type) is not tuple or parts[1:] != (...,):
        return
    kind = parts[0]
    fitting = {kind, int} if kind is float else {kind}
    if not isinstance(value, list | tuple) or not {*map(type, value)} <= fitting:
        hint = exponent_hint(value, is_float=kind is float) if kind is not str else ""
        raise ValueError(
            f"{key}={shown(value)} must be a list of values of type {kind.__name__} (on the "
            f"command line, separated by commas){hint}"
        )


def _example(field: dataclasses.Field, declaration: Declaration | None) -> str:
    """Return the default of a field as the end of a message, such as ", such as 0.1"."""
    default = field.default if declaration is None else declaration.default
    return "" if default in (dataclasses.MISSING, None, "") else f", such as {default!r}"
