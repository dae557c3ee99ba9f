"""JSON and YAML from strangers: limits, types and syntax errors."""

import math

import pytest

from tests.limits import limited_resources
from untrusted.documents import MAX_VALUES, parse_json, parse_yaml, read_json, read_yaml
from untrusted.schema import check_fields, is_of


def test_json_and_yaml_are_read(tmp_path):
    (tmp_path / "a.json").write_text('\ufeff{"a": [1, 2.5, "x", null]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5, "x", None]}
    assert parse_json("[1]", "here", list) == [1]
    (tmp_path / "a.yaml").write_text("a: {b: [1, 2.5, x, null]}")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": [1, 2.5, "x", None]}}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON .*too many nested brackets"),
        (b'{"a": NaN}', "is not valid JSON .*NaN is not a number"),
        (
            b'{"a": ' + b"9" * 1001 + b"}",
            "has an integer of 1,001 digits, 9{20}…, but at most 1,000 ",
        ),
        (b'{"a": -' + b"9" * 5000 + b"}", "has an integer of 5,001 digits"),
        (b'{"a": 1e999}', "has the number 1e999, which is too large for a float64"),
        (b'{"b": [{"a": 1, "a": 1}]}', "has the key 'a' twice in the same object; remove one"),
        (b"[1]", "must contain a JSON object"),
        (b"3", "must contain a JSON object"),
        (b"[" + b"[]," * MAX_VALUES + b"0]", "is too large: it has more than 2,000,000 values"),
    ],
)
def test_bad_json_is_refused_by_name(content, message):
    with pytest.raises(ValueError, match=f"^a.json {message}"):
        parse_json(content, "a.json")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "content, message",
    [
        (BOMB, r"is not valid YAML: line 2 has an alias, \*a"),
        ("[" * 500 + "]" * 500, "is not valid YAML: more than 100 nested values"),
        ("a: [1", "is not valid YAML"),
        ("a: 2001-99-99", "is not valid YAML"),
        ("a: !!python/object/apply:os.abort []", "is not valid YAML: could not determine"),
        ("- 1", "must contain sections of keys, not a list"),
        ("", "must contain sections of keys, not a NoneType"),
        ("1: 2", "has the key 1, but keys must be strings"),
        ("a: {[1, 2]: 3}", "is not valid YAML"),
        ("a: 1\nb: 2\na: {c: 1}", "has the key 'a' twice in the same object; remove one"),
        ("a: 0x" + "f" * 100_000, "has an integer of 100,002 digits"),
        ("a: " + ":".join("1" * 100_000), "has an integer of 199,999 digits"),
    ],
)
def test_bad_yaml_is_refused_by_name(content, message):
    with pytest.raises(ValueError, match=f"^a.yaml {message}"):
        parse_yaml(content.encode(), "a.yaml")


def test_largest_numbers_of_real_files_are_read():
    # The `model_max_length` of most tokenizers without a limit: int(1e30).
    text = '{"model_max_length": 1000000000000000019884624838656, "a": -1e308, "b": 5e-324}'
    assert parse_json(text, "a.json") == {"model_max_length": int(1e30), "a": -1e308, "b": 5e-324}
    assert parse_json('{"a": [NaN, -Infinity]}', "a.json", allows_nan=True)["a"][1] == -math.inf


def test_many_duplicate_keys_are_found_quickly():
    content = "{" + ", ".join(f'"{i}": 0' for i in range(200_000)) + ', "199999": 1}'
    with limited_resources(), pytest.raises(ValueError, match="has the key '199999' twice"):
        parse_json(content, "a.json")


def test_types_are_checked_with_the_types_of_items():
    assert is_of({"a": [1, 2]}, dict[str, list[int]])
    assert is_of(None, str | None)
    assert is_of(1, float)
    assert not is_of(True, int)
    assert not is_of({"a": [1, "2"]}, dict[str, list[int]])
    assert not is_of([1.5], list[int])


def test_wrong_fields_are_named():
    check_fields({"a": "x", "other": 1}, {"a": str, "b": int | None}, "f.json")
    with pytest.raises(ValueError, match=r"^f.json is damaged: it has no 'a'$"):
        check_fields({}, {"a": str}, "f.json")
    with pytest.raises(ValueError, match=r"^f.json: a is \[1\], but must be of type dict"):
        check_fields({"a": [1]}, {"a": dict[str, str]}, "f.json")


@pytest.mark.thorough
def test_json_of_the_largest_size_takes_little_memory():
    tracemalloc = pytest.importorskip("tracemalloc")
    content = b"[" + b"{}," * (MAX_VALUES // 2 - 1) + b"0]"
    tracemalloc.start()
    parse_json(content, "a.json", list)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400e6
