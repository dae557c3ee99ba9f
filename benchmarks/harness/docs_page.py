"""Writes tables into docs pages, each between two comments that name it.

<!-- NAME -->
the table
<!-- end of NAME -->
"""

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Replace the tables of a docs page; arguments and errors as for `with_tables`."""
    page.write_text(with_tables(page, tables), encoding="utf-8")


def with_tables(page: Path, tables: Mapping[str, str]) -> str:
    """Return the text of a docs page with its tables replaced.

    Args:
        page: path of the page.
        tables: name -> the new table, or other Markdown.

    Raises:
        ValueError: the page lacks a comment that marks the beginning or end of a table.
    """
    text = page.read_text(encoding="utf-8")
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
    heads, *others = rows
    return "\n".join([row(heads), "|---" * len(heads) + "|", *map(row, others)])


def row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
