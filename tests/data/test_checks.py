"""Helpers of the data config."""

from pathlib import Path

import pytest

from data.checks import matches_of
from data.text.text_files import find_files
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


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("data[1].txt", ["data[1].txt"]),  # a name
        ("data[12].txt", ["data1.txt"]),  # a glob
        ("runs[1]/*.txt", ["runs[1]/a.txt"]),
        ("runs[1]/data[1].txt", ["runs[1]/data1.txt"]),
        ("runs[12]/*.txt", ["runs1/b.txt"]),
        ("*[[]1]/*.txt", ["runs[1]/a.txt", "runs[1]/data1.txt"]),
        ("data[3].txt", []),
    ],
)
def test_names_of_files_and_folders_come_before_globs(pattern, expected, tmp_path, monkeypatch):
    for name in ("data[1].txt", "data1.txt", "runs[1]/a.txt", "runs[1]/data1.txt", "runs1/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if pattern == "runs[1]/*.txt":
        (tmp_path / "runs[1]" / "data1.txt").unlink()
    monkeypatch.chdir(tmp_path)
    for start in ("", f"{tmp_path}/"):
        found = sorted(matches_of(start + pattern))
        assert found == [start + name for name in expected]
    if expected:
        assert [str(file) for file in find_files((pattern,))] == expected
