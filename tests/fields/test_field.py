"""Declared fields: the rule in words, and which values break it."""

import dataclasses
import math

import pytest

from fields.field import Declaration, declarations, field, join_values


def declared(default, **rules) -> Declaration:
    """Return the declaration that `field` makes."""
    return field(default, "Its meaning.", **rules).metadata["declaration"]


@pytest.mark.parametrize(
    ("declaration", "rule"),
    [
        (declared(1, ge=1), "at least 1"),
        (declared(1, ge=1, also=(-1,)), "at least 1, or -1"),
        (declared(0.5, gt=0, lt=1), "more than 0 and less than 1"),
        (declared(0.5, ge=0, le=1), "from 0 to 1"),
        (declared(0, ge=0, le=2**32 - 1), "from 0 to 2**32 - 1"),
        (declared(None, gt=0), "more than 0, or None"),
        (declared("a", choices=("a", "b", "c")), "a, b or c"),
        (declared(None, choices=("a", "b")), "a, b or None"),
        (declared((0.0, 0.0), length=2, ge=0, le=1), "2 numbers, each from 0 to 1"),
        (declared("a", nonempty=True), "a non-empty string"),
        (declared((), nonempty=True), "a tuple of non-empty strings"),
        (declared(True), ""),
        (declared(None), ""),
    ],
)
def test_rule_describes_valid_values(declaration, rule):
    assert declaration.rule == rule


@pytest.mark.parametrize(
    ("declaration", "valid", "invalid"),
    [
        (declared(1, ge=1), (1, 2), (0, -1)),
        (declared(1, ge=1, also=(-1,)), (1, -1), (0, -2)),
        (declared(1.0, gt=0, lt=1), (0.5,), (0.0, 1.0, math.nan)),
        (declared(1.0, ge=0, le=1), (0.0, 1.0), (-0.1, 1.1, math.nan)),
        (declared(None, gt=1), (None, 1.5), (1.0,)),
        (declared("a", choices=("a", "b")), ("a", "b"), ("c", "", None)),
        (declared(None, choices=("a",)), ("a", None), ("b",)),
        (declared("a", nonempty=True), ("x",), ("",)),
        (declared((), nonempty=True), ((), ("x",)), (("x", ""), "x", (1,), None)),
        (
            declared((0.0, 0.0), length=2, ge=0, le=1),
            ((0, 1), (0.5, 0.5)),
            ((0.5,), (0.5, 2.0), 0.5, ("a", "b"), (True, False), (0, 0, 0)),
        ),
    ],
)
def test_problem_is_none_for_exactly_the_valid_values(declaration, valid, invalid):
    assert [value for value in valid if declaration.problem(value)] == []
    assert [value for value in invalid if not declaration.problem(value)] == []


def test_problem_has_rule_and_remedy():
    assert declared(1, ge=1).problem(0) == "must be at least 1"
    assert declared(1, ge=1, remedy="choose 3").problem(0) == "must be at least 1; choose 3"
    assert declared("a", choices=("a", "b")).problem("c") == "is unknown; choose a or b"
    channels = declared(1, choices=(3, 1), remedy="choose 3 (color)")
    assert channels.problem(4) == "is unknown; choose 3 (color)"


def test_summary_is_the_first_sentence():
    declaration = field(0, "Files that end in .txt or .csv, e.g. one. Others are skipped.")
    assert declaration.metadata["declaration"].summary == (
        "Files that end in .txt or .csv, e.g. one."
    )
    assert declared(0).summary == "Its meaning."


def test_required_field_has_a_default_for_configs_only():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Example:
        steps: int = field(100, "Steps.", required=True)
        seed: int = field(0, "Seed.")
        plain: int = 3

    assert [*declarations(Example)] == ["steps", "seed"]
    assert declarations(Example)["steps"].default == 100
    with pytest.raises(TypeError, match="steps"):
        Example()
    assert Example(steps=1).seed == 0


def test_joined_puts_or_before_the_last():
    assert join_values(["a"]) == "a"
    assert join_values(["a", 1, None]) == "a, 1 or None"
