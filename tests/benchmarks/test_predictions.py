"""Tests that the table of predictions in the docs matches the stored results."""

from benchmarks import predictions


def test_docs_show_the_table_of_results():
    text = predictions._DOCS.read_text(encoding="utf-8")
    assert predictions.with_table(text) == text
