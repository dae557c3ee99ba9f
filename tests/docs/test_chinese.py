"""The Chinese pages have the commands and tables of their English counterparts."""

import re

import pytest

from tests.docs.pages import (
    anchors_of,
    commands_of,
    generated_of,
    links_of,
    python_of,
    read_page,
    tables_of,
)
from tests.runs import ROOT

FOLDER = ROOT / "docs" / "zh"
PAGES = sorted(str(path.relative_to(ROOT)) for path in FOLDER.rglob("*.md"))
#: Pages that do not follow an English one.
ALONE = {"docs/zh/quickstart.md"}
PAIRS = [
    (page, "README.md" if page == "docs/zh/index.md" else page.replace("docs/zh/", "docs/"))
    for page in PAGES
    if page not in ALONE
]


@pytest.mark.parametrize(("page", "english"), PAIRS)
def test_commands_are_those_of_the_english_page(page, english):
    commands = commands_of(read_page(page))
    assert commands and commands == commands_of(read_page(english))
    assert python_of(read_page(page)) == python_of(read_page(english))


@pytest.mark.parametrize(("page", "english"), PAIRS)
def test_tables_are_those_of_the_english_page(page, english):
    assert tables_of(read_page(page)) == tables_of(read_page(english))


@pytest.mark.parametrize(("page", "english"), PAIRS)
def test_tables_that_a_command_writes_are_those_of_the_english_page(page, english):
    assert generated_of(page) == generated_of(english)


@pytest.mark.parametrize("page", sorted(ALONE))
def test_keys_exist(page):
    file = ROOT / "tests" / "train" / "config" / "default_keys.txt"
    known = {line.split()[0] for line in file.read_text(encoding="utf-8").splitlines()}
    sections = {key.partition(".")[0] for key in known if "." in key}
    text = re.sub(r"^\| `[^|]*\|", "|", read_page(page), flags=re.MULTILINE)  # names of others
    keys = re.findall(r"`(?:--config\.)?(\w+\.\w+)(?:=[^`]*)?`", text)
    keys += re.findall(r"--config\.(\w+\.\w+)=", text)
    keys = {key for key in keys if key.partition(".")[0] in sections - {"model"}}
    assert keys and keys <= known


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in links_of(read_page(page)):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES)
def test_text_is_chinese_and_says_first_what_the_reader_can_do(page):
    text = read_page(page)
    paragraphs = [part for part in text.split("\n\n") if not part.startswith(("#", "<"))]
    assert re.match("读完本页，你|用 Taibai，你可以", paragraphs[0])
    characters = re.findall(r"[\u4e00-\u9fff]", text)
    assert len(characters) > 400
    # A line break between two Chinese characters would be shown as a space.
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"[\u4e00-\u9fff]\n[\u4e00-\u9fff].*", prose)


def test_comparison_finds_differences():
    english = "```\n$ make train   # trains\npython -m a \\\n    --b=1\n```\n"
    english += "| a | b |\n|---|---|\n| `x` | 1 |\n"
    chinese = english.replace("trains", "训练").replace("| 1 |", "| 一 |")
    assert commands_of(english) == commands_of(chinese) == ["make train", "python -m a --b=1"]
    assert tables_of(english) == tables_of(chinese)
    assert commands_of(chinese.replace("--b=1", "--b=2")) != commands_of(english)
    assert tables_of(chinese.replace("`x`", "`y`")) != tables_of(english)
    assert tables_of(chinese + "| `z` | 2 |\n") != tables_of(english)
