"""Replaces the tables of a docs page, each between two comments that name it.

<!-- NAME -->
the table
<!-- end of NAME -->
"""

from collections.abc import Mapping, Sequence
from pathlib import Path


def with_tables(text: str, tables: Mapping[str, str], page: Path) -> str:
    """Return the text of a docs page with its tables replaced.

    Args:
        text: text of the page.
        tables: name -> the new table, or other Markdown.
        page: path of the page, for messages.

    Raises:
        ValueError: the page lacks a comment that marks the beginning or end of a table.
    """
    for name, table in tables.items():
        begin = f"<!-- {name} -->\n"
        end = f"\n<!-- end of {name} -->"
        before, _, after_begin = text.partition(begin)
        _, separator, after = after_begin.partition(end)
        if not separator:
            raise ValueError(f"{page} lacks {begin.strip()} or {end.strip()}; add a line for each")
        text = f"{before}{begin}{table}{end}{after}"
    return text


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table; the first row contains the heads."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
