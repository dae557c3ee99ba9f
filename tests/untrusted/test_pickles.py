"""Pickles from strangers are read as plain data, or refused."""

import collections
import dataclasses
import os
import pickle
import struct
from pathlib import Path

import pytest

from untrusted.pickles import Record, read_pickle

PROTOCOL = b"\x80\x04"


@dataclasses.dataclass
class Point:
    """An object with attributes."""

    x: int
    y: tuple


def _knows_tests(name: str) -> bool:
    return name.startswith("tests.")


def test_plain_data_is_what_was_pickled():
    data = collections.OrderedDict(a=[1, 2.5, None, True, "text", b"bytes"], b=(1, 2, 3, 4))
    data["same"] = data["a"]
    for protocol in (3, 4):
        assert read_pickle(pickle.dumps(data, protocol), "file", _knows_tests) == data


def test_objects_become_records():
    content = pickle.dumps({"point": Point(1, (2, 3))})
    point = read_pickle(content, "file", _knows_tests)["point"]
    assert isinstance(point, Record)
    assert point.name.endswith(".Point")
    assert (point.get("x"), point.get("y"), point.get("z")) == (1, (2, 3), None)


class _Command:
    """Pickles as a call of a function."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_code_does_not_run(tmp_path):
    file = tmp_path / "ran"
    content = pickle.dumps({"x": _Command(f"touch {file}")})
    with pytest.raises(ValueError, match=r"system, which is refused, because"):
        read_pickle(content, "file", _knows_tests)
    # Nor if the name is known: it is not imported.
    record = read_pickle(content, "file", lambda name: True)["x"]
    assert record.args == (f"touch {file}",)
    assert not Path(file).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        PROTOCOL + b"N",  # does not stop
        PROTOCOL + b"R.",  # nothing to call
        PROTOCOL + b"Nr\xff\xff\xff\xff.",  # a slot far away, for which 64 GiB would be allocated
        PROTOCOL + b"\x96" + struct.pack("<Q", 2**40) + b".",  # a bytearray of a terabyte
        PROTOCOL + b"]]u.",  # a key that has no hash
        PROTOCOL + b"P1\n.",  # an object that is stored elsewhere
        PROTOCOL + b"(cos\nsystem\n.",
        b"(S'touch x'\nios\nsystem\n.",
    ],
)
def test_other_content_is_refused_in_one_sentence(content):
    with pytest.raises(ValueError, match="file (is not a pickle|has an object)") as error:
        read_pickle(content, "file", _knows_tests)
    assert "\n" not in str(error.value)


def test_dicts_are_not_copied():
    """Copies of a list that is named again and again would need the square of the file's size."""
    call = PROTOCOL + b"ccollections\nOrderedDict\n]\x85R."
    with pytest.raises(ValueError, match="is not a pickle of plain data"):
        read_pickle(call, "file", _knows_tests)
