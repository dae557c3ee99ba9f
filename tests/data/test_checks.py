"""Helpers of the data config."""

from pathlib import Path

import pytest

from data.checks import matches_of
from tests.limits import limited_resources


@pytest.mark.parametrize("end", ["*.txt", "1/**/a.txt", "**"])
def test_repeated_wildcards_match_the_same_files_in_a_short_time(end, tmp_path):
    folder = tmp_path
    for depth in range(40):
        folder = folder / str(depth % 3)
        folder.mkdir()
        (folder / "a.txt").touch()
    expected = {str(path) for path in Path(tmp_path).glob(f"**/{end}")}
    with limited_resources():
        found = set(matches_of(f"{tmp_path}/" + "**/" * 20 + end))
    assert {str(Path(path)) for path in found} >= expected and expected
    if end != "**":  # which also matches files in glob.glob
        assert found == expected
