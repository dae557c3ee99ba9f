"""Reads the pages of the documentation: their commands, tables, links and headings."""

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from tests.runs import ROOT

#: The first words of commands that the pages show.
_PROGRAMS = r"(?:make|python|taibai|sbatch|\.venv/bin/\w+|source|--config|--mode)(?= |\.|=|$)"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"<!-- python -m .*? -->.*?<!-- end of .*? -->", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table: its number of rows, and those cells of its first column that have only code."""

    num_rows: int
    codes: tuple[str, ...]


def read_page(path: str) -> str:
    """Return the text of a page, without tables that a command writes into it."""
    return _GENERATED.sub("", (ROOT / path).read_text(encoding="utf-8"))


def generated_of(path: str) -> list[str]:
    """Return what commands write into a page, with the comments around it."""
    return _GENERATED.findall((ROOT / path).read_text(encoding="utf-8"))


def commands_of(text: str) -> list[str]:
    """Return the commands of all code blocks without a language, without comments.

    Lines that end with a backslash are joined. A comment begins after two spaces, or with ' # '.
    """
    commands = []
    for language, block in _FENCED.findall(text):
        if language:
            continue
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            line = line.removeprefix("$ ")
            if re.match(_PROGRAMS, line):
                commands.append(re.split(r"\s{2,}| # ", line, maxsplit=1)[0])
    return commands


def python_of(text: str) -> list[str]:
    """Return the code blocks in Python."""
    return [block for language, block in _FENCED.findall(text) if language == "python"]


def tables_of(text: str) -> list[Table]:
    """Return the tables of a page."""
    prose = _FENCED.sub("", text)
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
        rows = [line.split("|")[1].strip() for line in block.splitlines()][2:]
        codes = [cell for cell in rows if re.fullmatch(r"(`[^`]+`(, | )?)+", cell)]
        tables.append(Table(len(rows), tuple(codes)))
    return tables


def links_of(text: str) -> list[str]:
    """Return the targets of links and pictures, except those on other sites."""
    prose = _FENCED.sub("", text)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if "://" not in target]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return {_slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def _slug(title: str) -> str:
    """Return a title in lower case, with hyphens for spaces and without punctuation."""
    letters = [
        char
        for char in title.lower()
        if char in "-_ " or unicodedata.category(char)[0] in "LN"  # letters and numbers
    ]
    return "".join(letters).replace(" ", "-")
