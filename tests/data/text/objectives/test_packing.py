"""Best-fit packing: rows against a plain reference, whole documents, and the share of padding."""

import numpy as np
import pytest

from data.batches import train_batches
from data.corpus import load_corpus
from data.examples import Examples
from data.text.objectives.packing import pack
from tests.data.corpora import EOS, documents, jsonl_config
from tests.runs import TINY
from tests.train.refusals import refusal

T = 64


def best_fit_decreasing(sizes, length: int, max_items: int | None) -> list[list[int]]:
    """Return the contents of bins, by the definition: the fullest bin in which an item fits."""
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rooms = [
            (length - sum(sizes[i] for i in each), number)
            for number, each in enumerate(bins)
            if len(each) != max_items
        ]
        fitting = [(room, number) for room, number in rooms if room >= sizes[item]]
        if fitting:
            bins[min(fitting)[1]].append(item)
        else:
            bins.append([item])
    return bins


@pytest.mark.parametrize("max_items", [None, 1, 3])
def test_rows_are_those_of_best_fit_decreasing(max_items):
    """Among equally full rows any may be chosen, so the filled tokens of rows are compared."""
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(1, T + 1, size=seed * 7)
        packing = pack(sizes, T, best_fit=True, max_items=max_items)
        rows = [packing.items_of(row).tolist() for row in range(len(packing))]
        assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
        assert all(sizes[row].sum() <= T and len(row) <= (max_items or T) for row in rows)
        expected = best_fit_decreasing(sizes.tolist(), T, max_items)
        if max_items is None:
            found = sorted(int(sizes[row].sum()) for row in rows)
            assert found == sorted(int(sizes[row].sum()) for row in expected)
        assert len(rows) == len(expected)
        if len(rows):
            assert packing.fill_rate == pytest.approx(sizes.sum() / (T * len(rows)), abs=0)


def test_little_is_padding():
    """The paper wastes less than 0.01 % of 2,048 tokens on a large corpus (table 1)."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, size=20_000).astype(np.int64)
    sizes = np.clip(lengths, 1, 2048)
    assert pack(sizes, 2048, best_fit=True).fill_rate > 0.999 > pack(sizes, 2048).fill_rate


def pieces_of(rows: Examples) -> list[bytes]:
    """Return the documents of all rows, or pieces of them, by their segments."""
    pieces = []
    for row in map(rows.__getitem__, range(len(rows))):
        for segment in range(1, row["segment_ids"].max() + 1):
            here = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["positions"][here], np.arange(here.sum()))
            tokens = row["tokens"][here]
            np.testing.assert_array_equal(tokens[1:], row["targets"][here][:-1])
            pieces.append(bytes(byte for byte in row["targets"][here].tolist() if byte != EOS))
            assert (row["weights"][here] == 1).all()
        assert row["weights"].sum() == (row["segment_ids"] > 0).sum()
    return pieces


def test_documents_are_cut_only_if_they_are_too_long(tmp_path):
    texts = documents()
    config = jsonl_config(
        tmp_path,
        texts,
        sequence_length=T,
        packing="best_fit",
        isolate_documents=True,
        validation_fraction=0,
    )
    corpus = load_corpus(config)
    # A document's last target is its end; one of exactly T - 1 bytes still fits.
    expected = [
        piece
        for text in map(str.encode, texts)
        for start in range(0, len(text) + 1, T)
        if (piece := text[start : start + T]) or start == len(text)
    ]
    assert any(len(text) > T for text in texts)
    assert sorted(pieces_of(corpus.train)) == sorted(expected)
    rows = len(corpus.train)
    tokens = sum(len(text) + 1 for text in map(str.encode, texts))
    assert corpus.train.fill_rate == tokens / (rows * T)
    again = load_corpus(config)
    batches = [next(train_batches(each, config, range(6), seed=1)) for each in (corpus, again)]
    for name, value in batches[0].items():
        np.testing.assert_array_equal(value, batches[1][name])
    plain = load_corpus(jsonl_config(tmp_path, texts, sequence_length=T, validation_fraction=0))
    assert plain.train.fill_rate is None and plain.fingerprint == corpus.fingerprint


def test_packing_is_refused_where_it_is_not_read(tmp_path, capsys):
    changes = (*TINY, "data.objective=masked_lm", "data.packing=best_fit")
    error = refusal(tmp_path, (*changes, f"data.paths={tmp_path}/x.txt"), capsys)
    assert "data.packing='best_fit' is read only with data.objective='causal_lm'" in error
