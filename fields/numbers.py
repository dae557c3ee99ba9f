"""The range of every number in a config, unless its declaration states another one.

A step computes with int32 and float32, so a larger number could only overflow there. Numbers from
files and from the command line have no such range: Python reads 10**400 without a complaint.
"""

import math
import re
from typing import Any

#: Largest absolute value of an integer: the largest int32.
MAX_INT = 2**31 - 1
#: Largest absolute value of any other number: the largest float32.
MAX_FLOAT = float.fromhex("0x1.fffffep+127")
#: Largest number of layers of a model; the deepest published models have about 1,000.
MAX_LAYERS = 10_000

_MAX_CHARACTERS = 60
#: A number with an exponent, such as 3e-4: its digits, its fraction and its exponent.
_EXPONENT = re.compile(r"([+-]?\d{1,20})(?:\.(\d{0,20}))?[eE]([+-]?)(\d{1,3})")


def number_problem(
    value: Any, *, is_float: bool = False, max_int: float | None = None
) -> str | None:
    """Return why a number is too large, as the rest of a message after `key=value`.

    Args:
        value: value, or a tuple or list of values; values that are not numbers are ignored.
        is_float: whether an integer stands for a float, as in `learning_rate=1`.
        max_int: largest integer, if the field declares one; None for MAX_INT.

    Returns:
        The violated rule, or None if there is no problem.
    """
    limit = MAX_INT if max_int is None else max(max_int, MAX_INT)
    for part in value if isinstance(value, list | tuple) else (value,):
        if type(part) is int and not is_float and not -limit <= part <= limit:
            return f"must be an integer from {-limit} to {limit}; choose one in this range"
        # NaN is outside of all bounds.
        if type(part) in (int, float) and not -MAX_FLOAT <= part <= MAX_FLOAT:
            return "must be finite, with an absolute value of at most 3.4e38 (a float32)"
    return None


def exponent_hint(value: Any, *, is_float: bool = True) -> str:
    """Return the end of a message about a string that YAML 1.1 does not read as a number.

    It reads `3e-4` and `1.5e3` as strings, because its numbers with an exponent have both a dot and
    a sign of the exponent. They are not converted here: a string of this form is a valid name, and
    a config is also read before the types of its fields are checked.

    Args:
        value: value that must be a number, or a tuple or list of such values.
        is_float: whether it must be a float, not an int.

    Returns:
        Such as "; in YAML, write 3.0e-4"; "" if the value contains no string of this form.
    """
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, str) and (match := _EXPONENT.fullmatch(part)):
            if not is_float:
                return "; write it without an exponent"
            digits, fraction, sign, exponent = match.groups()
            return f"; in YAML, write {digits}.{fraction or 0}e{sign or '+'}{exponent}"
    return ""


def shown(value: Any) -> str:
    """Return a value as a short part of a message, even if it is an integer of 10,000 digits."""
    is_long = type(value) is int and value.bit_length() > 1000
    text = f"an integer of {round(value.bit_length() * math.log10(2)):,} digits" if is_long else ""
    if not text:
        try:
            text = repr(value)
        except ValueError:  # a tuple that contains such an integer
            text = f"a {type(value).__name__} with an integer of thousands of digits"
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…"
