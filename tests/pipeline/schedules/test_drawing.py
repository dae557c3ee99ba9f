"""Drawings of tables as text and as pictures."""

import re
import xml.etree.ElementTree

import pytest

from pipeline.schedules.drawing import draw_picture, draw_text
from pipeline.schedules.generators import interleaved_1f1b, one_f_one_b, zbv
from pipeline.schedules.simulate import CLOCKS, OperationTimes


def test_text_has_a_stage_per_line_and_a_tick_per_column():
    assert draw_text(one_f_one_b(2, 3)) == (
        "tick    0  1    2    3    4\nstage 0 F0 F1   F2B0 B1   B2\nstage 1 .  F0B0 F1B1 F2B2 ."
    )


def test_text_tells_chunks_apart_by_letters():
    assert draw_text(zbv(1, 2)) == (
        "tick    0   1         2         3      4   5   6\n"
        "stage 0 F0a F0bI0bW0b F1aI0aW0a F1bI1b I1a W1b W1a"
    )


@pytest.mark.parametrize("clock", CLOCKS)
def test_picture_numbers_every_operation_and_names_every_kind_and_chunk(tmp_path, clock):
    schedule = zbv(2, 3)
    draw_picture(schedule, OperationTimes(), clock, tmp_path / "a.svg")
    texts = [
        "".join(element.itertext()).strip()
        for element in xml.etree.ElementTree.parse(tmp_path / "a.svg").iter()
        if element.tag.endswith("}text")
    ]
    for kind in ("forward", "input gradient", "weight gradient"):
        assert {f"{kind}, chunk 0", f"{kind}, chunk 1"} <= set(texts)
    assert f"time ({clock} clock)" in texts
    numbered = re.findall(
        r"font-size: 7px[^>]*>(\d+)<", (tmp_path / "a.svg").read_text(encoding="utf-8")
    )
    assert sorted(numbered) == sorted("012" * 3 * 4)


def test_picture_is_the_same_to_the_byte_and_small(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_picture(interleaved_1f1b(4, 8, 2), OperationTimes(), "synchronous", tmp_path / name)
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    assert len(first) < 60_000


def test_picture_is_a_png_only_if_requested(tmp_path):
    draw_picture(one_f_one_b(2, 2), OperationTimes(), "free", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"'.*a\.pdf' must end in \.svg or \.png"):
        draw_picture(one_f_one_b(2, 2), OperationTimes(), "free", tmp_path / "a.pdf")
