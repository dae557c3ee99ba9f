"""Checks values against the annotated types of a dataclass's fields, and the range of numbers."""

import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Any

from fields.field import bound_of
from fields.numbers import number_problem, shown


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
        section: The dataclass.
        values: Field name -> value. Modified in place: ints of float fields become floats.
        name: Name of the section in messages, such as "model".
        exclude: Names of fields that are not checked.
        tuples: Whether to check fields of type `tuple[X, ...]` too.

    Raises:
        ValueError: A value has the wrong type or is out of range; the message names the key, the
            value and the type or the range.
    """
    for field in dataclasses.fields(section):
        if field.name not in values or field.name in exclude:
            continue
        value = values[field.name]
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
            raise ValueError(f"{name}.{field.name}={shown(value)} must be of type {kind}")
        if tuples and typing.get_origin(of) is tuple and parts[1:] == (...,):
            kind = parts[0]
            fitting = {kind, int} if kind is float else {kind}
            if not isinstance(value, list | tuple) or not {*map(type, value)} <= fitting:
                raise ValueError(
                    f"{name}.{field.name}={shown(value)} must be a list of values of type "
                    f"{kind.__name__} (on the command line, separated by commas)"
                )
