"""Strategies of hypothesis that damage valid files: their bytes, or the values of their JSON."""

import copy
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import yaml
from hypothesis import strategies as st


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


_WORDS = ("", "a", "yarn", "gelu", "../../etc/passwd", "NaN", "1e400", "os:abort", "[UNK]")
_TEXTS = (*_WORDS, "float32", "\0", "\ud800", "\x1b[2J", "é" * 50, "x" * 20_000)
_SMALL = (None, True, False, 0, 1, -1, 2, 3, 7, 255, 1000, 0.5, -0.5)
_INTEGERS = (10**5, 10**8, 2 * 10**9, 2**31 - 1, 2**31, 10**12, 2**63, -(2**63), 2**64, 10**400)
_LARGE = (*_INTEGERS, 1e-320, 1e30, 1e39, 1e308, -1e308)
_NOT_FINITE = (math.nan, math.inf, -math.inf)
_LISTS = ([], [[]], [0], [-1], [10**9], ["a"], [None], [1.5, "x"], _nested(120), [7] * 2000)
_DICTS = ({}, {"": None}, {"a": {"b": 1}}, {str(i): i for i in range(500)})
_VALUES = (*_TEXTS, *_SMALL, *_LARGE, *_NOT_FINITE, *_LISTS, *_DICTS)

#: Values that programs rarely expect.
HOSTILE_VALUES = st.sampled_from(_VALUES).map(copy.deepcopy) | st.one_of(
    st.integers(), st.floats(), st.text(max_size=20), st.integers(-4, 70)
)

_MARKS = b"\r\n|\n|\0| |\t|,|{|}|[|]|:|\"|'|- |&a|*a|!!python/object:os.abort".split(b"|")
_NUMBERS = b"NaN|-1|1e999|0x|null|true".split(b"|")
_BINARY = (b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f")
_LONG = (b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"A" * 70_000)

#: Parts of text that a parser may stumble over.
HOSTILE_BYTES = st.sampled_from((b"", *_MARKS, *_NUMBERS, *_BINARY, *_LONG)) | st.binary(
    max_size=12
)


@st.composite
def damaged_bytes(draw: Any, contents: Sequence[bytes]) -> bytes:
    """Draw one of `contents` with some bytes replaced, removed, repeated or inserted."""
    content = draw(st.sampled_from(contents))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from([0, 0, 1, 1, 2, 4, 8, 60, 10**6])))
        replacement = draw(HOSTILE_BYTES | st.just(content[start:end] * 2))
        content = content[:start] + replacement + content[end:]
    return content


@st.composite
def damaged_values(draw: Any, seeds: Sequence[Any]) -> Any:
    """Draw a JSON value of `seeds` with some values in it replaced, removed, renamed or added."""
    whole = [copy.deepcopy(draw(st.sampled_from(seeds)))]
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(_places(whole)))
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "rename"]))
        if action == "replace" or container is whole:
            container[key] = draw(HOSTILE_VALUES)
        elif action == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, draw(HOSTILE_VALUES))
        elif action == "rename":
            container[draw(st.text(max_size=8))] = container.pop(key)
        else:
            container[draw(st.text(max_size=8))] = draw(HOSTILE_VALUES)
    return whole[0]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a container, except in very long ones."""
    places = []
    stack = [value]
    while stack:
        container = stack.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, each in list(items)[:200]:
            places.append((container, key))
            if isinstance(each, dict | list):
                stack.append(each)
    return places


def damaged_json(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw JSON with wrong values, or, more rarely, with wrong bytes."""
    values = damaged_values([json.loads(content) for content in contents])
    by_values = values.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    return by_values | by_values | by_values | damaged_bytes(contents)


def damaged_yaml(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw YAML with wrong values, or, more rarely, with wrong bytes."""
    values = damaged_values([yaml.safe_load(content) for content in contents])
    by_values = values.map(_dump_yaml)
    return by_values | by_values | by_values | damaged_bytes(contents)


def _dump_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


def damaged_lines(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw lines of JSON, one or several of which are damaged."""
    lines = [line for content in contents for line in content.splitlines()]
    several = st.lists(damaged_json(lines) | st.sampled_from(lines), min_size=1, max_size=6)
    return several.map(b"\n".join) | damaged_bytes(contents)


def damaged_safetensors(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw safetensors files whose header has wrong values, or whose bytes are wrong."""

    def rebuilt(parts: tuple[bytes, bytes]) -> bytes:
        header, values = parts
        return struct.pack("<Q", len(header)) + header + values

    strategies = []
    for content in contents:
        (length,) = struct.unpack_from("<Q", content)
        header = damaged_json([content[8 : 8 + length]])
        strategies.append(st.tuples(header, st.just(content[8 + length :])).map(rebuilt))
    return st.one_of(*strategies) | damaged_bytes(contents)
