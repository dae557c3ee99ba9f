"""Drawn cases are the same for the same seed, and all cases are drawn over time."""

from tests.drawn import draw


def test_draw_is_repeated_by_its_seed_and_covers_all_cases():
    assert draw("a test", 9, 3, "2026-01-01") == draw("a test", 9, 3, "2026-01-01")
    assert len(set(draw("a test", 9, 3, "2026-01-01"))) == 3
    days = [draw("a test", 9, 3, f"2026-01-{day:02}") for day in range(1, 32)]
    assert {index for indices in days for index in indices} == set(range(9))
    assert days != [draw("another test", 9, 3, f"2026-01-{day:02}") for day in range(1, 32)]
    assert sorted(draw("a test", 2, 3, "any")) == [0, 1]
