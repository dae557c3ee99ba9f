"""CSV tables: round trips, files written by PyTorch, and files with mistakes."""

import dataclasses

import pytest
from hypothesis import given

from pipeline.schedules.csv_table import read_csv, write_csv
from pipeline.schedules.generators import one_f_one_b, zbv
from pipeline.schedules.table import Op, verify
from tests.limits import limited_resources
from tests.pipeline.schedules.tables import properties, schedules

#: Written by ScheduleZBVZeroBubble(2 stages, 2 microbatches)._dump_csv of torch 2.13.
TORCH_ZBV = """\
0F0,0F1,,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,,,,0I1,0W1,,
,1F0,2F0,1F1,2F1,2I0,2W0,,1I0,1W0,,2I1,2W1,1I1,,,1W1,,
"""
#: The same for ScheduleInterleaved1F1B(2 stages of 2 chunks, 2 microbatches). Its rows differ in
#: length.
TORCH_INTERLEAVED = """\
0F0,0F1,2F0,2F1,,,,2B0,,2B1,,0B0,,0B1
,1F0,1F1,,3F0,3B0,3F1,3B1,,1B0,,1B1
"""


@given(schedules())
@properties
def test_table_round_trips_through_its_file(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    write_csv(schedule, path)
    assert read_csv(path) == dataclasses.replace(schedule, name=str(path))


def test_a_file_is_a_row_per_stage_in_pytorchs_notation(tmp_path):
    write_csv(one_f_one_b(2, 2), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "0F0,0F1,0B0,0B1\n,1F0;1B0,1F1;1B1,\n"
    write_csv(zbv(1, 1), tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text().startswith("0F0,1F0;1I0")


@pytest.mark.parametrize(
    ("text", "placement", "sixth"),
    [(TORCH_ZBV, (0, 1, 1, 0), Op("I", 0, 1)), (TORCH_INTERLEAVED, (0, 1, 0, 1), Op("B", 0, 1))],
    ids=["zbv", "interleaved"],
)
def test_tables_of_pytorch_are_read_and_run_as_they_stand(tmp_path, text, placement, sixth):
    (tmp_path / "torch.csv").write_text(text)
    schedule = read_csv(tmp_path / "torch.csv")
    verify(schedule)
    assert schedule.placement == placement
    assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == (2, 2, 2)
    assert len(schedule.ticks) == max(len(line.split(",")) for line in text.splitlines())
    assert schedule.ticks[5][1] == (sixth,)


def test_spaces_a_byte_order_mark_and_blank_lines_do_not_matter(tmp_path):
    text = "\ufeff0F0 ; 0B0\n\n"
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read_csv(tmp_path / "a.csv").ticks == (((Op("F", 0), Op("B", 0)),),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n,0F,\n",
            r"a\.csv, row 2, column 2: '0F' is not an operation; write virtual stage",
        ),
        ("0F0,0SEND_F0\n", r"a\.csv, row 1, column 2: '0SEND_F0' is not an operation"),
        ("(0F1;1B0)OVERLAP_F_B\n", r"a\.csv, row 1, column 1: '\(0F1' is not an operation"),
        ("\n0F0,0B0\n1F0,x\n", r"a\.csv, row 3, column 2: 'x' is not an operation"),
        ("0F0\n0B0\n", r"a\.csv: virtual stage 0 runs in row 1 and in row 2"),
        ("0F0\n2F0\n", r"2 virtual stages in 2 rows; virtual stage 1 is in no row"),
        ("0F0,1F0\n2F0\n", r"3 virtual stages in 2 rows; every row must have the same number"),
        (",,\n", r"a\.csv has no operations"),
        ("", r"a\.csv has no operations"),
    ],
)
def test_a_mistake_is_named_with_file_row_and_column(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(tmp_path / "a.csv")


def test_a_row_with_more_chunks_than_another_is_refused_by_the_placement(tmp_path):
    (tmp_path / "a.csv").write_text("0F0,1F0,2F0\n3F0\n")
    with pytest.raises(ValueError, match="stage 0 holds 3 virtual stages; every stage must hold 2"):
        verify(read_csv(tmp_path / "a.csv"))


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.csv cannot be read: No such file"):
        read_csv(tmp_path / "gone.csv")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.csv cannot be read: it is not text"):
        read_csv(tmp_path / "a.csv")


HUGE_TABLES = {
    "a row of commas": lambda: "0F0" + "," * 15_000_000,
    "a million rows": lambda: "".join(f"{row}F0\n" for row in range(1_000_000)),
    "short rows, and one of a million columns": lambda: "0F0" + "," * 10**6 + "\n1F0" * 10**6,
    "empty lines": lambda: "0F0" + "\n" * 15_000_000,
    "cells of many operations": lambda: ("0F0;" * 30_000 + ",") * 100,
    "a billion microbatches": lambda: "0F0,0F999999999,0B0",
    "an endless microbatch": lambda: "0F" + "9" * 100_000,
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", HUGE_TABLES)
def test_huge_table_is_refused_in_one_short_sentence(name, tmp_path):
    path = tmp_path / "huge.csv"
    path.write_text(HUGE_TABLES[name]())
    with limited_resources(), pytest.raises(ValueError) as caught:
        read_csv(path)
    sentence = str(caught.value)
    assert "huge.csv" in sentence and "choose fewer" in sentence or "is not an op" in sentence
    assert sentence.isprintable() and len(sentence) < 500
