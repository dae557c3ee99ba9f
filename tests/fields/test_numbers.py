"""Every number of a config has a range, whether or not its declaration states bounds."""

import dataclasses
import math
from typing import Any

import pytest

from fields.field import field
from fields.numbers import MAX_FLOAT, MAX_INT, number_problem, shown
from fields.section import Section
from fields.types import check_types
from models.registry import MODELS, find_model
from train.config.schema import SECTIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Section, section="example"):
    """An example."""

    steps: int = field(5, "Steps.", ge=1)
    seed: int = field(0, "Seed.", ge=0, le=2**32 - 1)
    rate: float = field(0.1, "Rate.", ge=0)
    blur: tuple[float, ...] = field((0.0,), "Blur.", length=1)


@pytest.mark.parametrize(
    "key, value",
    [
        ("steps", 2**31),
        ("steps", -(2**31)),
        ("steps", 10**400),
        ("steps", 16**5000),  # Python refuses to print it.
        ("seed", 2**32),
        ("rate", 10**400),
        ("rate", math.inf),
        ("rate", math.nan),
        ("rate", 1e39),
        ("blur", (10**400,)),
        ("blur", (-math.inf,)),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_section_refuses_numbers_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"^example\.{key}=.{{1,99}} must be ") as caught:
        Example(**{key: value})
    assert len(str(caught.value)) < 200


def test_section_takes_the_largest_numbers():
    example = Example(steps=MAX_INT, seed=2**32 - 1, rate=MAX_FLOAT, blur=(MAX_FLOAT,))
    assert example.steps == MAX_INT
    assert example.rate == MAX_FLOAT


@pytest.mark.parametrize("value", [10**400, math.inf, math.nan])
def test_no_section_or_model_takes_a_number_out_of_range(value):
    classes: dict[str, Any] = {name: find_model(name).Config for name in MODELS}
    classes |= SECTIONS
    num_checked = 0
    for name, section in classes.items():
        for each in dataclasses.fields(section):
            kinds = str(each.type)
            if ("int" in kinds and type(value) is int) or "float" in kinds:
                given = (value,) if "tuple" in kinds else value
                with pytest.raises(ValueError, match=rf"^{name}\.{each.name}=") as caught:
                    check_types(section, {each.name: given}, name)
                assert "must be" in str(caught.value)
                num_checked += 1
    assert num_checked > 50


def test_text_and_bools_are_no_numbers():
    assert number_problem("9" * 500) is None
    assert number_problem((True, None, "x")) is None


def test_shown_is_short_for_any_value():
    assert shown(3) == "3"
    assert shown("a") == "'a'"
    assert shown(16**5000) == "an integer of 6,021 digits"
    assert shown([16**5000]) == "a list with an integer of thousands of digits"
    assert len(shown("x" * 10**6)) < 99
