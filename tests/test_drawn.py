"""Drawn cases are the same for the same seed, and all cases are drawn over time."""

from typing import Any

import pytest

from tests.drawn import draw, draw_cases, take_turns, turn


def test_draw_is_repeated_by_its_seed_and_covers_all_cases():
    assert draw("a test", 9, 3, "2026-01-01") == draw("a test", 9, 3, "2026-01-01")
    assert len(set(draw("a test", 9, 3, "2026-01-01"))) == 3
    days = [draw("a test", 9, 3, f"2026-01-{day:02}") for day in range(1, 32)]
    assert {index for indices in days for index in indices} == set(range(9))
    assert days != [draw("another test", 9, 3, f"2026-01-{day:02}") for day in range(1, 32)]
    assert sorted(draw("a test", 2, 3, "any")) == [0, 1]


class Item:
    """A collected test, with the marker of its file."""

    def __init__(self, name: str, config: pytest.Config, *markers: str):
        self.nodeid = f"test_file.py::{name}"
        self.path = config.rootpath / "test_file.py"
        self.config = config
        self.markers: dict[str, Any] = {name: getattr(pytest.mark, name).mark for name in markers}
        self.markers["drawn"] = pytest.mark.drawn(2, among="thorough").mark

    def get_closest_marker(self, name: str):
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


def test_draw_among_the_thorough_tests_of_a_file_leaves_its_quick_tests(pytestconfig):
    thorough = [Item(f"test_{i}", pytestconfig, "thorough") for i in range(5)]
    quick = [Item("test_quick", pytestconfig)]
    items: list[Any] = [*thorough, *quick]
    draw_cases(items)
    assert sum("slow" in item.markers for item in thorough) == 3
    assert "slow" not in quick[0].markers


def test_draw_of_a_name_is_among_the_tests_of_all_files(pytestconfig):
    items: list[Any] = [Item(f"test_{i}", pytestconfig, "thorough") for i in range(6)]
    for i, item in enumerate(items):
        item.path = pytestconfig.rootpath / f"test_file_{i}.py"
        item.markers["drawn"] = pytest.mark.drawn(2, of="whole runs").mark
    draw_cases(items)
    assert sum("slow" not in item.markers for item in items) == 2


def test_thorough_tests_run_on_one_of_three_days(pytestconfig):
    names = [f"test_{i}" for i in range(100)]
    days = [[turn(name, f"2026-01-0{day}") for name in names] for day in (1, 2, 3, 4)]
    assert days[0] == days[3]
    assert [sum(runs) for runs in zip(*days[:3], strict=True)] == [1] * 100
    assert 15 < sum(days[0]) < 55
    thorough = [Item(name, pytestconfig, "thorough") for name in names]
    quick = [Item(name, pytestconfig) for name in names]
    drawn = [Item(name, pytestconfig, "thorough") for name in names]
    for item in (*thorough, *quick):
        del item.markers["drawn"]
    items: list[Any] = [*thorough, *quick, *drawn]
    take_turns(items)
    assert ["slow" not in item.markers for item in thorough] == [turn(x.nodeid) for x in thorough]
    assert not any("slow" in item.markers for item in (*quick, *drawn))


def test_all_cases_of_a_thorough_test_have_one_turn(pytestconfig):
    names = [f"test_{letter}" for letter in "abcdefghij"]
    cases = [Item(f"{name}[{i}]", pytestconfig, "thorough") for name in names for i in range(3)]
    for item in cases:
        item.markers["drawn"] = pytest.mark.drawn(2).mark
    items: list[Any] = [*cases]
    take_turns(items)
    runs = [turn(f"test_file.py::{name}") for name in names for _ in range(3)]
    assert ["slow" not in item.markers for item in cases] == runs
