"""Declares a config field once: its default, its meaning, and the values that it may have.

A section of the config is a dataclass (see fields/section.py) whose fields are declared here:

    num_workers: int = field(0, "Number of worker processes.", ge=0)

The declaration is the only place that states these facts. The section's range check, the default
ConfigDict, docs/config.md and `--help` all read it. Numbers are also limited to the range of
fields/numbers.py.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from fields.paths import url_problem

_KEY = "declaration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """The facts about one config field; `field` describes them."""

    default: Any
    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[Any, ...] = ()
    choices: tuple[Any, ...] = ()
    length: int | None = None
    nonempty: bool = False
    is_path: bool = False
    splits: bool = False
    remedy: str = ""

    @property
    def is_optional(self) -> bool:
        """Whether the value may be None. Exactly the optional fields have None as their default."""
        return self.default is None

    @property
    def has_numbers(self) -> bool:
        """Whether the value is a tuple of a fixed number of numbers."""
        return self.length is not None and not self.nonempty

    @property
    def rule(self) -> str:
        """The values that the field may have, such as "at least 1, or -1"; "" if any is valid.

        It completes the sentence "the value must be ...".
        """
        if self.choices:
            return join_values([*self.choices, *([None] if self.is_optional else [])])
        rule = _bounds(self)
        if self.length is not None:
            rule = f"{self.length} numbers, each {rule}" if rule else f"{self.length} numbers"
        if self.nonempty:
            is_tuple = isinstance(self.default, tuple)
            count = self.length or "a tuple of"
            rule = f"{count} non-empty strings" if is_tuple else "a non-empty string"
        others = [*self.also, *([None] if self.is_optional else [])]
        return f"{rule}, or {join_values(others)}" if rule and others else rule

    @property
    def summary(self) -> str:
        """The first sentence of `doc`."""
        return re.split(r"(?<=\.)\s+(?=[A-Z0-9`])", self.doc)[0]

    def problem(self, value: Any) -> str | None:
        """Return how a value breaks the rule, as the rest of a message after `key=value`.

        Args:
            value: value of the field's type; for a tuple, anything.

        Returns:
            The violated rule and the remedy, or None if the value is valid.
        """
        if (value is None and self.is_optional) or value in self.also:
            return None
        if self.is_path and (problem := url_problem(value)):
            return problem
        if self.choices:
            if value in self.choices:
                return None
            return f"is unknown; {self.remedy or f'choose {self.rule}'}"
        is_tuple = isinstance(self.default, tuple)
        parts = value if is_tuple else (value,)
        if (
            isinstance(parts, tuple)
            and self.length in (None, len(parts))
            and all(map(self._is_valid, parts))
        ):
            return None
        return f"must be {self.rule}" + (f"; {self.remedy}" if self.remedy else "")

    def _is_valid(self, part: Any) -> bool:
        """Return whether a value, or one element of a tuple, is within the bounds.

        The comparisons are written so that NaN is outside all bounds.
        """
        if self.nonempty:
            return isinstance(part, str) and part != ""
        if self.has_numbers and type(part) not in (int, float):
            return False
        return (
            (self.ge is None or part >= self.ge)
            and (self.gt is None or part > self.gt)
            and (self.le is None or part <= self.le)
            and (self.lt is None or part < self.lt)
        )


def field(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    also: Sequence[Any] = (),
    choices: Sequence[Any] = (),
    length: int | None = None,
    nonempty: bool = False,
    is_path: bool = False,
    splits: bool = False,
    remedy: str = "",
    required: bool = False,
) -> Any:
    """Declare a field of a config dataclass.

    Args:
        default: value in the default ConfigDict. None also makes None a valid value.
        doc: meaning, in Markdown; `--help` prints its first sentence.
        ge: value, or each element of a tuple, must be at least this.
        gt: it must be more than this.
        le: it must be at most this.
        lt: it must be less than this.
        also: valid values outside the bounds.
        choices: all valid values, if there are only a few.
        length: number of elements of a tuple; of numbers, unless it is `nonempty`.
        nonempty: whether the string, or each string of a tuple, must not be empty.
        is_path: whether the string, or each string of a tuple, may be a path, which must not be a
            URL.
        splits: whether a string stands for a tuple of its parts, which commas separate.
        remedy: end of the error message, which says what to do instead.
        required: whether a ConfigDict that lost this key is an error. It has the key at first: a
            config starts from the default ConfigDict, and a dict or a YAML file is merged into it.
            Keys that were added later are not required: runs saved before still load.

    Returns:
        A `dataclasses.field` whose metadata has the Declaration.
    """
    declaration = Declaration(
        default=default,
        doc=doc,
        ge=ge,
        gt=gt,
        le=le,
        lt=lt,
        also=tuple(also),
        choices=tuple(choices),
        length=length,
        nonempty=nonempty,
        is_path=is_path,
        splits=splits,
        remedy=remedy,
    )
    metadata = {_KEY: declaration}
    if required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declarations(section: type) -> dict[str, Declaration]:
    """Return the fields of a dataclass that were declared with `field`, in their order."""
    return {
        each.name: each.metadata[_KEY]
        for each in dataclasses.fields(section)
        if _KEY in each.metadata
    }


def declaration_of(field: dataclasses.Field) -> Declaration | None:
    """Return the declaration of a field of a dataclass; None if it has none."""
    return field.metadata.get(_KEY)


def join_values(values: Sequence[Any]) -> str:
    """Join values for a message: `join_values(["a", "b", None])` is "a, b or None"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def _bounds(declaration: Declaration) -> str:
    """Return the bounds in words, such as "more than 0 and at most 1"."""
    if declaration.ge is not None and declaration.le is not None:
        return f"from {_number(declaration.ge)} to {_number(declaration.le)}"
    parts = []
    for words, bound in (
        ("at least", declaration.ge),
        ("more than", declaration.gt),
        ("at most", declaration.le),
        ("less than", declaration.lt),
    ):
        if bound is not None:
            parts.append(f"{words} {_number(bound)}")
    return " and ".join(parts)


def _number(value: float) -> str:
    """Return a bound as text; the largest 32-bit integers as powers: "2**32 - 1"."""
    power = int(value) + 1
    if power > 2**16 and power & (power - 1) == 0:
        return f"2**{power.bit_length() - 1} - 1"
    return str(value)
