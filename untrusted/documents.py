"""Parses JSON and YAML that may come from a stranger, with limited memory and time.

Python's parsers turn a few bytes into large objects: an empty list, `[],` in a file, takes 64 bytes
in memory, and 300 bytes of YAML aliases expand to gigabytes. Both files and values are limited
here, and every problem is a ValueError of one sentence that names the file:

    too large         more bytes, or more values, than any real file has
    huge numbers      integers of more than 1,000 digits, and 1e999, which Python reads as infinity
    duplicate keys    of which Python's parsers silently keep the last
    not JSON or YAML  syntax errors, invalid UTF-8, NaN in JSON, too many nested brackets
    YAML aliases      `*name` and `<<`, which files written by this project never contain
    another type      a list where an object is expected
"""

import collections
import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from untrusted.files import MAX_BYTES, open_regular, read_bytes
from untrusted.messages import shortened

T = TypeVar("T")

#: Maximum number of values and brackets in a document. Each takes at most about 250 bytes.
MAX_VALUES = 2_000_000
#: Maximum nesting depth of lists and objects.
MAX_DEPTH = 100
#: Maximum number of digits of an integer. `model_max_length` often has 31; computing with integers
#: of thousands of digits takes minutes.
MAX_DIGITS = 1000
#: Maximum size of a YAML file; the parser reads about 100 KB per second.
MAX_YAML_BYTES = 256 * 2**10

_KINDS: dict[type, str] = {dict: "object", list: "list"}


def parse_json(
    content: bytes | str, where: object, kind: type[T] = dict, *, allows_nan: bool = False
) -> T:
    """Parse JSON.

    Args:
        content: JSON text; bytes must be UTF-8.
        where: file or place that the text comes from, for messages.
        kind: type that the value must have: dict or list.
        allows_nan: whether NaN and Infinity are numbers, as in files that Python's json wrote.

    Raises:
        ValueError: The text is not JSON of this type, or has too many values, a huge number or
            duplicate keys.
    """
    opening, comma = (b"[{", b",") if isinstance(content, bytes) else ("[{", ",")
    num_values = sum(content.count(mark) for mark in (opening[:1], opening[1:], comma))  # type: ignore
    if num_values > MAX_VALUES:
        raise ValueError(f"{where} is too large: it has more than {MAX_VALUES:,} values")
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = (_DECODER_WITH_NAN if allows_nan else _DECODER).decode(text)
    except _ProblemError as error:
        raise ValueError(f"{where} {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is not valid JSON ({_reason(error)}); it is damaged or has another format"
        ) from None
    if not isinstance(value, kind):
        raise ValueError(
            f"{where} must contain a JSON {_KINDS[kind]}; it is damaged or has another format"
        )
    return value


def read_json(
    path: Path,
    kind: type[T] = dict,
    *,
    within: Path | None = None,
    max_bytes: int = MAX_BYTES,
    allows_nan: bool = False,
) -> T:
    """Read a JSON file; the arguments are those of `parse_json` and `untrusted.files.read_bytes`.

    Raises:
        ValueError: See `parse_json` and `untrusted.files.read_bytes`.
        OSError: The file cannot be read.
    """
    content = read_bytes(path, within=within, max_bytes=max_bytes)
    return parse_json(content, path, kind, allows_nan=allows_nan)


def read_json_lines(path: Path, *, within: Path | None = None) -> list[dict[str, Any]]:
    """Read a file with a JSON object per line; other lines, such as torn ones, are left out.

    Raises:
        ValueError: See `untrusted.files.open_regular`.
        OSError: The file cannot be read.
    """
    lines = each_json_line(path, within=within)
    return [each for _, each in lines if each is not None]


def each_json_line(
    path: Path, *, within: Path | None = None
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number of each line, from 1 on, and its JSON object; None if it has none.

    Raises:
        ValueError: See `untrusted.files.open_regular`.
        OSError: The file cannot be read.
    """
    with open_regular(path, within=within) as file:
        number = 0
        while line := file.readline(MAX_BYTES):
            number += 1
            value = None
            with contextlib.suppress(ValueError):
                value = parse_json(line, path)
            yield number, value


def number_as_json(value: Any) -> Any:
    """Return a value for a JSON file: NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number_from_json(value: Any) -> Any:
    """Return the value that `number_as_json` was given."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def parse_yaml(content: bytes, where: object) -> dict[str, Any]:
    """Parse YAML that contains a mapping with strings as keys.

    Args:
        content: YAML text.
        where: file or place that the text comes from, for messages.

    Raises:
        ValueError: The text is not such YAML, or has aliases, duplicate keys, a huge integer or too
            many nested values.
    """
    try:
        value = yaml.load(content, Loader=_Loader)
    except _ProblemError as error:
        raise ValueError(f"{where} {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"{where} is not valid YAML: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} must contain sections of keys, not a {type(value).__name__}")
    _check_keys(value, where)
    return value


def read_yaml(path: Path, *, within: Path | None = None) -> dict[str, Any]:
    """Read a YAML file that contains a mapping with strings as keys.

    Raises:
        ValueError: See `parse_yaml` and `untrusted.files.read_bytes`.
        OSError: The file cannot be read.
    """
    return parse_yaml(read_bytes(path, within=within, max_bytes=MAX_YAML_BYTES), path)


class _ProblemError(ValueError):
    """A problem of a syntactically valid document, as the rest of a sentence about it."""


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses aliases, duplicate keys, huge integers and deep nesting."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has an alias, *{event.anchor}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} nested values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            _refuse_duplicates([self.construct_object(key) for key, _ in node.value])
        return mapping

    def construct_yaml_int(self, node: Any) -> int:
        _check_digits(self.construct_scalar(node))
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        _refuse_duplicates([key for key, _ in pairs])
    return values


def _refuse_duplicates(keys: list[Any]) -> None:
    (first, _), *_ = collections.Counter(keys).most_common(1)
    raise _ProblemError(
        f"has the key {shortened(repr(first))} twice in the same object; remove one of them"
    )


def _integer(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    if len(text) > MAX_DIGITS:
        raise _ProblemError(
            f"has an integer of {len(text):,} digits, {shortened(text, 20)}, but at most "
            f"{MAX_DIGITS:,} are allowed"
        )


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _ProblemError(
            f"has the number {shortened(text, 20)}, which is too large for a float64"
        )
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_refuse_constant,
)
_DECODER_WITH_NAN = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_constant=float
)


def _check_keys(mapping: dict[Any, Any], where: object) -> None:
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {key!r}, but keys must be strings")
        if isinstance(value, dict):
            _check_keys(value, where)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "too many nested brackets"
    return shortened(error)
