"""The pictures of the pages: they can be read in both colour schemes, and show what pages say."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from PIL import Image

from docs import draw_models
from tests.docs.pages import read_page
from tests.runs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted(
    {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
)
_WHITE = ("white", "#ffffff", "#fff")


def has_white_background(svg: str) -> bool:
    """Return whether a style or the first shape of an SVG paints all of it white."""
    root = ElementTree.fromstring(svg)
    shapes = {}
    for element in root.iter():
        tag = element.tag.rpartition("}")[2]
        if tag == "style" and re.search(r"svg \{ background: white;", element.text or ""):
            return True
        if tag in ("rect", "path"):
            shapes.setdefault("first", (tag, element))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    tag, first = shapes["first"]
    fill = first.get("fill") or dict(re.findall(r"(\w+): ?([^;]+)", first.get("style", "")))["fill"]
    if tag == "rect":
        corner = (float(first.get("x", 0)), float(first.get("y", 0)))
        size = (float(first.attrib["width"]), float(first.attrib["height"]))
        covers = corner == (0, 0) and size == (width, height)
    else:
        numbers = [float(number) for number in re.findall(r"[\d.]+", first.attrib["d"])]
        corners = {*zip(numbers[::2], numbers[1::2], strict=True)}
        covers = corners == {(0, 0), (width, 0), (0, height), (width, height)}
    return covers and fill in _WHITE


def test_pages_show_pictures():
    assert len(PICTURES) > 10 and {path.suffix for path in PICTURES} == {".png", ".svg"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_picture_has_an_opaque_background(picture):
    """Otherwise its dark text could not be read on the dark pages."""
    if picture.suffix == ".svg":
        assert has_white_background(picture.read_text(encoding="utf-8"))
    else:
        alpha = Image.open(picture).convert("RGBA").getchannel("A")
        assert alpha.getextrema() == (255, 255)


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("<style>svg { background: white; }</style>", True),
        ('<rect width="8" height="4" fill="white"/>', True),
        ('<rect width="8" height="4" fill="none"/>', False),
        ('<rect width="7" height="4" fill="white"/>', False),
        ('<path d="M 0 4 L 8 4 L 8 0 L 0 0 z" style="fill: #ffffff"/>', True),
        ('<path d="M 0 4 L 8 4 L 8 0 L 0 0 z" style="fill: none"/>', False),
        ('<path d="M 0 4 L 7 4 L 7 0 L 0 0 z" style="fill: #ffffff"/>', False),
    ],
)
def test_background_is_recognized(inside, expected):
    assert has_white_background(f'<svg viewBox="0 0 8 4">{inside}</svg>') == expected


def test_colours_follow_the_system_until_the_reader_chooses():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    first, *others = config["theme"]["palette"]
    assert first["media"] == "(prefers-color-scheme)" and "scheme" not in first
    assert [palette["scheme"] for palette in others] == ["default", "slate"]


def write_metrics(workdir: Path, evaluations: dict[int, float]) -> Path:
    workdir.mkdir()
    lines = [{"step": step, "loss": 8 - step / 5} for step in (1, 5, 10)]
    lines += [{"step": step, "eval_loss": loss} for step, loss in evaluations.items()]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workdir


def test_picture_of_losses_has_a_panel_per_run(tmp_path, monkeypatch):
    monkeypatch.setattr(draw_models, "PICTURE", tmp_path / "models.svg")
    runs = [write_metrics(tmp_path / "a", {5: 7.5, 10: 6.25}), write_metrics(tmp_path / "b", {})]
    draw_models.main([str(run) for run in runs])
    svg = (tmp_path / "models.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text.*>(.*)</text>", svg)
    assert [text for text in texts if text in ("a", "b")] == ["a", "b"]
    assert texts.count("training") == 2 and texts.count("validation 6.25") == 1
    paths = re.findall(r'<path d="M([^"]*)" class="(training|validation)"/>', svg)
    assert [(len(line.split("L")), kind) for line, kind in paths] == [
        (3, "training"),
        (2, "validation"),
        (3, "training"),
    ]


def test_run_without_losses_has_no_picture(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no loss; name the directory"):
        draw_models.read_curves(tmp_path)


def test_picture_of_losses_shows_those_of_the_table():
    rows = re.findall(r"^\| `(\w+)\.py` \|.*\| ([\d.]+)[^|]*\|", read_page("docs/models.md"), re.M)
    table = dict(rows)
    svg = draw_models.PICTURE.read_text(encoding="utf-8")
    names = re.findall(r'class="name">(\w+)<', svg)
    losses = re.findall(r">validation ([\d.]+)<", svg)
    assert len(names) == 6 and {name: table.get(name) for name in names} == dict(
        zip(names, losses, strict=True)
    )
