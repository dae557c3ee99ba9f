"""Sections check the type and the rule of every declared field, and name them in errors."""

import dataclasses

import pytest
import yaml

from fields.field import field
from fields.numbers import exponent_hint
from fields.section import Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Section, section="example"):
    """An example."""

    steps: int = field(5, "Steps.", ge=1, remedy="choose 5")
    rate: float = field(0.1, "Rate.", ge=0)
    budget: float | None = field(None, "Budget.", gt=0)
    blur: tuple[float, ...] = field((0.0, 0.0), "Blur.", length=2, ge=0)
    flip: bool = field(False, "Flip.")
    name: str = field("a", "Name.", choices=("a", "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "example.steps=0 must be at least 1; choose 5"),
        ({"steps": 2.0}, "example.steps=2.0 must be of type int, such as 5"),
        ({"steps": True}, "example.steps=True must be of type int, such as 5"),
        ({"rate": "fast"}, "example.rate='fast' must be of type float, such as 0.1"),
        ({"budget": "all"}, "example.budget='all' must be of type float or None"),
        ({"budget": 0.0}, "example.budget=0.0 must be more than 0, or None"),
        ({"blur": (1.0,)}, "example.blur=(1.0,) must be 2 numbers, each at least 0"),
        (
            {"rate": "3e-4"},
            "example.rate='3e-4' must be of type float, such as 0.1; in YAML, write 3.0e-4",
        ),
        (
            {"budget": "1.5E3"},
            "example.budget='1.5E3' must be of type float or None; in YAML, write 1.5e+3",
        ),
        (
            {"blur": ["-1e2", 0.5]},
            "example.blur=('-1e2', 0.5) must be 2 numbers, each at least 0; in YAML, write -1.0e+2",
        ),
        (
            {"steps": "1e3"},
            "example.steps='1e3' must be of type int, such as 5; write it without an exponent",
        ),
        ({"name": "3e-4"}, "example.name='3e-4' is unknown; choose a or b"),
        ({"flip": 1}, "example.flip=1 must be of type bool, such as False"),
        ({"name": "c"}, "example.name='c' is unknown; choose a or b"),
    ],
)
def test_section_names_key_value_rule_and_remedy(changes, message):
    with pytest.raises(ValueError) as caught:
        Example(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["3e-4", "1.5E3", "-1e2", "+2.e5", "12.25e10"])
def test_hint_for_a_number_with_an_exponent_is_the_same_number_in_yaml(text):
    assert isinstance(yaml.safe_load(text), str)
    hint = exponent_hint(text)
    assert yaml.safe_load(hint.removeprefix("; in YAML, write ")) == float(text)


def test_section_takes_ints_as_floats_and_lists_as_tuples():
    example = Example(rate=1, budget=2, blur=[0.5, 1])  # pyright: ignore[reportArgumentType]
    assert example == Example(rate=1.0, budget=2.0, blur=(0.5, 1.0))
    assert type(example.rate) is type(example.budget) is float
    assert type(example.blur) is tuple


def test_section_is_checked_when_it_is_replaced():
    with pytest.raises(ValueError, match=r"example\.steps=0 must be at least 1"):
        dataclasses.replace(Example(), steps=0)
