"""URLs in the place of paths, which a Path would turn into local folders named after the scheme."""

import argparse
from pathlib import Path

import pytest

from fields.paths import check_local, local_path, url_problem


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("gs://bucket/run", "mount the store"),
        (Path("gs://bucket/run"), "mount the store"),  # gs:/bucket/run
        ("s3://bucket/data[1]/*.txt", "mount the store"),
        ("memory://run", "mount the store"),
        ("https://example.com/model", "mount the store"),
        ("simplecache::zip://a.txt::s3://bucket/a.zip", "mount the store"),
        ("FILE:///home/me/run", "write the path without file://"),
        (
            "hf://me/gpt2@main/config.json",
            "'hf download me/gpt2 --local-dir=FOLDER', and name the folder",
        ),
        (
            "hf://datasets/me/texts/*.jsonl",
            "'hf download --repo-type=dataset me/texts --local-dir=FOLDER'",
        ),
        ("hf://\x1b[31m", "'hf download OWNER/NAME --local-dir=FOLDER'"),
        (("a.txt", "gs://bucket/*.txt"), "mount the store"),
    ],
)
def test_url_is_refused_with_a_remedy(value, remedy):
    problem = url_problem(value)
    assert problem is not None and remedy in problem and problem.isprintable()
    with pytest.raises(ValueError, match=r"^--workdir=.* (is a|contains the) URL"):
        check_local("--workdir", value)


@pytest.mark.parametrize(
    "value",
    [
        "runs/gpt2",
        "runs/2026-11-28T10:00:00/config.yaml",
        "./gs:/bucket",
        "configs/llama.py:3-8b",
        "config.py:/data/x",
        "C:/runs",
        "a:b",
        "",
        None,
        3,
        ("a", "b"),
    ],
)
def test_path_of_a_file_system_passes(value):
    check_local("--workdir", value)


def test_option_that_is_a_url_is_an_error_of_the_parser(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=local_path)
    assert parser.parse_args(["--out=a/b"]).out == Path("a/b")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out=gs://bucket/out"])
    assert "argument --out: 'gs://bucket/out' is a URL" in capsys.readouterr().err
