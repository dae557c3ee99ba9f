"""Tests that the table of predictions in the docs matches the stored results."""

from benchmarks import predictions
from benchmarks.harness import docs_page, report


def test_docs_show_the_table_of_results():
    text = predictions._DOCS.read_text(encoding="utf-8")
    tables = predictions.tables(report.read_json(predictions._RESULTS))
    assert docs_page.with_tables(predictions._DOCS, tables) == text
