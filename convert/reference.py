"""Prints the reference of all families: docs/families.md and `convert.from_hf --list`.

`python -m convert.reference` prints the page, and `--docs` writes it to docs/families.md. Both
texts come from the architectures' own tables.
"""

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path

from convert.architecture import Architecture
from convert.keys import Keys, Only
from convert.registry import architectures
from untrusted.commands import command_parser, run_command

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

_INTRODUCTION = """\
# Families of Hugging Face models

Here you can look up which Hugging Face models can be imported and exported;
[convert.md](convert.md) says how. `python -m convert.from_hf --list` prints the same. `python -m
convert.reference --docs` writes this page; do not edit it.

A rule names the values that a key of config.json may have; others are rejected.
"""
_FUSED = "adapters must be merged, because the files store several linear layers as one"
_WIDTH = 100  # columns of the text of --list


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table.

    Attributes:
        name: name of the family, as people call it.
        architectures: names of its architectures.
        tried: names on the hub of the models whose config.json a test reads.
        rules: values of config.json that are not supported, in words.
    """

    name: str
    architectures: tuple[str, ...]
    tried: tuple[str, ...]
    rules: tuple[str, ...]


def families() -> list[Family]:
    """Return the families in the order of the registry."""
    members: dict[str, list[Architecture]] = {}
    for architecture in architectures().values():
        members.setdefault(architecture.family, []).append(architecture)
    return [
        Family(
            name=name,
            architectures=tuple(each.name for each in group),
            tried=tuple(dict.fromkeys(model for each in group for model in each.tried)),
            rules=tuple(dict.fromkeys(rule for each in group for rule in _rules_of(each))),
        )
        for name, group in members.items()
    ]


def table() -> str:
    """Return the table in Markdown."""
    rows = [
        (
            family.name,
            ", ".join(family.architectures),
            ", ".join(family.tried),
            "; ".join(family.rules),
        )
        for family in families()
    ]
    head = ("family", "`architectures`", "published models whose config.json is tested", "rules")
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines) + "\n"


def listing() -> str:
    """Return the families as text for a terminal."""
    parts = []
    for family in families():
        parts.append(family.name)
        for title, values, separator in (
            ("architectures", family.architectures, ", "),
            ("tried", family.tried, ", "),
            ("rules", family.rules, "; "),
        ):
            if values:
                text = f"  {title:<15}{separator.join(values).replace('`', '')}"
                indent = " " * 17
                parts += textwrap.wrap(
                    text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False
                )
    return "\n".join(parts)


def page() -> str:
    """Return docs/families.md."""
    return f"{_INTRODUCTION}\n{table()}"


def _rules_of(architecture: Architecture) -> Iterator[str]:
    """Yield the rules for config.json and for the files."""
    for key in architecture.keys:
        if isinstance(key, Only | Keys) and key.rule:
            yield key.rule
    if any(row.part and row.kind != "interleaved" for row in architecture.rows):
        yield _FUSED


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = command_parser("convert.reference")
    parser.add_argument("--docs", action="store_true", help="write docs/families.md")
    if parser.parse_args(argv).docs:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    run_command(main)
