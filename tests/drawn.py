"""Cases of large grids that CI draws at random, by a seed that it prints.

`@pytest.mark.drawn(4)` on a parametrized test lets each run choose 4 of its cases. The others are
marked as slow, so that `-m slow` runs them. The seed is the day, so that CI covers the grids over
time; set TAIBAI_TEST_SEED to repeat a draw.

`pytestmark = pytest.mark.drawn(3, among="thorough")` does the same with the thorough tests of a
file that have no draw of their own. `@pytest.mark.drawn(3, of="whole runs")` draws from all tests
with this name, in all files: those that start, kill and restart whole runs.

Thorough tests take turns: CI runs each, or its draw, on every third day (`take_turns`). Those that
are drawn from a file or from several files do not: each of these draws is new every day.
"""

import collections
import datetime
import os
import random
import zlib

import pytest

#: Worker processes inherit the variable, so that all of them draw the same cases.
SEED = os.environ.setdefault("TAIBAI_TEST_SEED", datetime.date.today().isoformat())


def draw(name: str, num_cases: int, count: int, seed: str = SEED) -> list[int]:
    """Return the indices of `count` of the cases, or of all if there are fewer.

    Args:
        name: test whose cases these are; each test has its own draw.
    """
    return random.Random(f"{seed} {name}").sample(range(num_cases), min(count, num_cases))


def function_id(item: pytest.Item) -> str:
    """Return the node id of a test without its case."""
    return item.nodeid.partition("[")[0]


def draw_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of tests with `drawn` that are not chosen as slow.

    If some cases of a test are thorough, its quick cases always run. With `drawn(count, by=name)`,
    so many cases are drawn for each value of this argument; with `drawn(count, among="thorough")`,
    so many of all thorough tests of a file that have this marker as their closest; and with
    `drawn(count, of=name)` so many of all tests that have this name, in all files.
    """
    drawn = [item for item in items if item.get_closest_marker("drawn")]
    thorough = {function_id(item) for item in drawn if item.get_closest_marker("thorough")}
    groups: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in drawn:
        stays_quick = function_id(item) in thorough and not item.get_closest_marker("thorough")
        marker = item.get_closest_marker("drawn")
        if marker is None or stays_quick or item.get_closest_marker("slow"):
            continue
        if "of" in marker.kwargs:
            groups[marker.kwargs["of"]].append(item)
            continue
        if marker.kwargs.get("among") == "thorough":
            if item.get_closest_marker("thorough"):
                groups[str(item.path.relative_to(item.config.rootpath))].append(item)
            continue
        by = marker.kwargs.get("by")
        value = item.callspec.params[by] if by and isinstance(item, pytest.Function) else ""
        groups[f"{function_id(item)} {value}"].append(item)
    for name, cases in groups.items():
        marker = cases[0].get_closest_marker("drawn")
        assert marker is not None
        chosen = draw(name, len(cases), marker.args[0])
        for index, item in enumerate(cases):
            if index not in chosen:
                item.add_marker(pytest.mark.slow)


def turn(name: str, seed: str = SEED) -> bool:
    """Return whether a test that takes turns runs with this seed: on one of three days in a row."""
    try:
        number = datetime.date.fromisoformat(seed).toordinal()
    except ValueError:
        number = zlib.crc32(seed.encode())
    return (zlib.crc32(name.encode()) + number) % 3 == 0


def take_turns(items: list[pytest.Item]) -> None:
    """Mark the thorough tests whose turn it is not as slow; all cases of a draw have one turn."""
    for item in items:
        drawn = item.get_closest_marker("drawn")
        is_from_several = drawn is not None and not {"of", "among"}.isdisjoint(drawn.kwargs)
        if not item.get_closest_marker("thorough") or is_from_several:
            continue
        if not turn(item.nodeid if drawn is None else function_id(item)):
            item.add_marker(pytest.mark.slow)
