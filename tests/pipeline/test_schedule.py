"""Schedules by name and from files, and the command line."""

import re
from pathlib import Path

import pytest
from hypothesis import given

from pipeline.schedule import SCHEDULES, main, make_schedule
from pipeline.schedules.csv_table import read_csv, write_csv
from pipeline.schedules.drawing import draw_text
from pipeline.schedules.generators import forward_only, one_f_one_b, zbv
from pipeline.schedules.table import Op
from tests.limits import limited_resources
from tests.pipeline.schedules.tables import properties, schedules, with_cell

DOCS = Path(__file__).parents[2] / "docs" / "pipelines.md"


@given(schedules())
@properties
def test_make_schedule_returns_the_named_schedule(schedule):
    counts = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
    assert make_schedule(schedule.name, *counts) == schedule


def test_make_schedule_reads_a_table_and_changes_nothing(tmp_path):
    path = str(tmp_path / "mine.csv")
    write_csv(zbv(2, 3), path)
    assert make_schedule(path, 2, 3, 2).ticks == zbv(2, 3).ticks


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((4, 3, 2), r"2 stages, 3 microbatches and 2 chunks, but the run has 4 stages; set mesh"),
        ((2, 8, 2), r"but the run has 8 microbatches; .*train\.num_microbatches=3"),
        ((2, 3, 1), r"but the run has 1 chunks; .*pipeline\.chunks=2"),
    ],
)
def test_make_schedule_refuses_a_table_for_other_counts(tmp_path, counts, message):
    path = str(tmp_path / "mine.csv")
    write_csv(zbv(2, 3), path)
    with pytest.raises(ValueError, match=message):
        make_schedule(path, *counts)


def test_make_schedule_refuses_a_broken_table_by_operation_and_file(tmp_path):
    path = str(tmp_path / "mine.csv")
    write_csv(with_cell(one_f_one_b(2, 2), 0, 1, (Op("F", 1),)), path)
    with pytest.raises(ValueError, match=r"mine\.csv: F1 on stage 1 runs twice: in ticks 0 and 2"):
        make_schedule(path, 2, 2, 1)


def test_make_schedule_refuses_a_table_without_backwards(tmp_path):
    path = str(tmp_path / "mine.csv")
    write_csv(forward_only(2, 2), path)
    with pytest.raises(ValueError, match=r"mine\.csv has no backward; add B, or I and W"):
        make_schedule(path, 2, 2, 1)


def test_make_schedule_refuses_an_unknown_name_and_lists_the_known():
    with pytest.raises(ValueError, match=r"pipeline\.schedule='1f2b' is unknown; .* gpipe, 1f1b,"):
        make_schedule("1f2b", 2, 2, 1)


@pytest.mark.parametrize("counts", [(0, 2, 1), (2, 0, 1), (2, 2, 0)])
def test_make_schedule_refuses_counts_below_one(counts):
    name = ("stages", "microbatches", "chunks")[counts.index(0)]
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        make_schedule("gpipe", *counts)


def test_command_line_prints_the_table_and_its_figures(capsys):
    main(["--schedule=gpipe", "--stages=2", "--microbatches=3"])
    printed = capsys.readouterr().out
    assert draw_text(SCHEDULES["gpipe"](2, 3)) in printed
    assert re.search(r"^free +0\.250 +12$", printed, re.MULTILINE)
    assert re.search(r"^synchronous +0\.250 +12$", printed, re.MULTILINE)
    assert re.search(r"^most activations.* in chunks: \[3, 3\]$", printed, re.MULTILINE)
    assert "in stages" not in printed


def test_command_line_prints_activations_per_stage_if_stages_have_chunks(capsys):
    main(["--schedule=interleaved_1f1b", "--stages=2", "--microbatches=4", "--chunks=2"])
    printed = capsys.readouterr().out
    assert re.search(r"^most activations.* in chunks: \[5, 3\]$", printed, re.MULTILINE)
    assert re.search(r"^most activations.* in stages: \[2\.5, 1\.5\]$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--schedule=1f1b", "--forward=2", "--backward=3"], 11 * 5),
        (["--schedule=1f1b", "--input-gradient=3", "--weight-gradient=2"], 11 * 6),
        (["--schedule=zero_bubble", "--backward=3"], 8 * 4 + 3 * 1.5),
        (["--schedule=zero_bubble", "--input-gradient=2"], 8 * 4 + 3 * 2),
        (["--schedule=gpipe", "--stages=2", "--microbatches=1", "--send=4"], 2 * 3 + 2 * 4),
    ],
)
def test_command_line_takes_times(arguments, expected, capsys):
    main(arguments)
    found = re.search(r"^synchronous +\S+ +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert found and float(found[1]) == pytest.approx(expected)


def test_command_line_writes_a_table_that_it_reads(tmp_path, capsys):
    path = str(tmp_path / "mine.csv")
    main(["--schedule=zbv", "--stages=2", "--microbatches=3", "--chunks=2", f"--csv={path}"])
    written = capsys.readouterr().out
    assert read_csv(path).ticks == zbv(2, 3).ticks
    main([f"--schedule={path}"])
    assert capsys.readouterr().out == written


def exit_code_of(arguments: list[str]) -> int | str | None:
    """Return the exit code; argparse ends the process for options that it refuses."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule=zigzag"], "pipeline.schedule='zigzag' is unknown"),
        (["--stages=0"], "--stages=0 must be at least 1"),
        (["--microbatches=-1"], "--microbatches=-1 must be at least 1"),
        (["--schedule=zbv"], "exactly 2 chunks of layers per stage, not pipeline.chunks=1"),
        (["--chunks=2"], "choose interleaved_1f1b"),
        (["--forward=0"], "time forward=0 must be a finite number above 0"),
        (["--picture=a.pdf"], "'a.pdf' must end in .svg or .png"),
        (["--picture=no/such/folder/a.svg"], "cannot be used: it does not exist"),
        (["--csv=no/such/folder/a.csv"], "cannot be used: it does not exist"),
        (["--schedule=gone.csv"], "gone.csv cannot be read: No such file or directory"),
        (["--clock=slow"], "argument --clock: invalid choice: 'slow'"),
    ],
)
def test_command_line_refuses_bad_arguments_in_one_sentence(arguments, message, capsys):
    assert exit_code_of(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    "counts", [(1000, 100_000, 1), (10**9, 1, 1), (2, 4, 10**9), (1, 10**5000, 1)]
)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_huge_table_is_refused_before_it_is_made(name, counts):
    with limited_resources(), pytest.raises(ValueError) as caught:
        make_schedule(name, *counts)
    sentence = str(caught.value)
    assert sentence.startswith(f"pipeline.schedule={name}: a table of ")
    assert "must be at most 262144; choose fewer microbatches" in sentence and len(sentence) < 500


def documented_commands() -> list[list[str]]:
    text = DOCS.read_text(encoding="utf-8")
    return [line.split() for line in re.findall(r"pipeline\.schedule (--.*)", text)]


@pytest.mark.thorough
def test_documented_pictures_can_be_drawn_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "pipelines").mkdir(parents=True)
    for arguments in documented_commands():
        main(arguments)
    drawn = {path.name for path in (tmp_path / "docs" / "pipelines").iterdir()}
    committed = {path.name for path in DOCS.with_suffix("").iterdir()}
    shown = set(re.findall(r"\(pipelines/(\S+?)\)", DOCS.read_text(encoding="utf-8")))
    assert drawn == committed == shown
