"""The share of the text that is held out, if documents are identical, very long, or few."""

import json
import logging

import numpy as np
import pytest

from data.text.hold_out import held_out_shares
from data.text.text_corpus import load_text
from data.text.text_files import split_files
from tests.data.corpora import jsonl_config

# The smallest size of a sequence, so that no miss is accepted because of it.
SEQUENCE = 1


def shares_of(groups: list[tuple[int, int]], fraction: float, seed: int, may_cut=False):
    """Split documents with random hashes.

    Args:
        groups: for each group of identical documents, their size and their number.
        fraction: fraction to hold out.
        seed: seed of the hashes.
        may_cut: whether documents may be cut.

    Returns:
        The share of the text that is held out, and the shares of the documents.
    """
    rng = np.random.default_rng(seed)
    counts = [count for _, count in groups]
    sizes = np.repeat([size for size, _ in groups], counts)
    hashes = np.repeat(rng.integers(0, 2**64, len(groups), dtype=np.uint64), counts)
    cuts = np.full(len(sizes), may_cut)
    shares = held_out_shares(sizes, hashes, cuts, fraction)
    return (shares * sizes).sum() / sizes.sum(), shares


CASES = {
    # The best that whole documents allow is one of 41.
    "copies and one more": ([(1, 40), (1, 1)], 0.2, 1 / 41),
    "copies and one more, mostly held out": ([(1, 40), (1, 1)], 0.9, 40 / 41),
    "half are copies": ([(1, 100)] + [(1, 1)] * 100, 0.05, 0.05),
    "growing sizes": ([(size, 1) for size in range(1, 61)], 0.05, 0.05),
    "growing sizes, mostly held out": ([(size, 1) for size in range(1, 61)], 0.95, 0.95),
    "one very long document": ([(10_000, 1)] + [(100, 1)] * 20, 0.05, 0.05),
    "exact only without the first that fits": ([(5, 1), (10, 1), (85, 1)], 0.1, 0.1),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_are_chosen_whose_share_is_nearest(case):
    groups, fraction, expected = CASES[case]
    for seed in range(50):
        share, shares = shares_of(groups, fraction, seed)
        assert share == pytest.approx(expected, abs=0.01)
        assert set(shares) == {0, 1}
        identical = np.split(shares, np.cumsum([count for _, count in groups])[:-1])
        assert all(len(set(group)) == 1 for group in identical), "copies are in both splits"


def test_documents_with_the_smallest_hashes_are_held_out_if_their_share_is_right():
    rng = np.random.default_rng(0)
    hashes = rng.permutation(1000).astype(np.uint64) * np.uint64(2**54)
    sizes = rng.integers(1, 100, 1000)
    shares = held_out_shares(sizes, hashes, np.full(1000, False), 0.2)
    assert shares[hashes < np.uint64(0.19 * 2**64)].all()
    assert not shares[hashes > np.uint64(0.21 * 2**64)].any()


@pytest.fixture
def write(tmp_path):
    """Return a function that writes texts as lines of a .jsonl file, and returns the file."""

    def write_(texts):
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return file

    return write_


def test_share_that_misses_the_request_is_reported_with_both_shares(write, caplog):
    file = write(["the same line"] * 40 + ["another line."])
    with caplog.at_level(logging.INFO):
        splits = split_files([file], 0.2, SEQUENCE)
    assert len(splits["validation"]) == 1
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(f"Held out 2.44 % of the text in {file} instead of 20 % (data.val")
    assert "identical documents stay in one split" in warning


@pytest.mark.parametrize("sequence_length", [1, 1000])
def test_miss_of_less_than_one_sequence_is_not_reported(sequence_length, write, caplog):
    file = write([f"line {i}" for i in range(5)])
    with caplog.at_level(logging.INFO):
        split_files([file], 0.3, sequence_length)
    levels = [record.levelno for record in caplog.records]
    assert (logging.WARNING in levels) == (sequence_length == 1)


def test_split_that_would_be_nearly_empty_is_refused(write):
    file = write(["x" * 100_000, "short"])
    message = r"validation split would be 0\.\d+ % of the text in .* instead of 50 %.*divide long"
    with pytest.raises(ValueError, match=message):
        split_files([file], 0.5, SEQUENCE)
    assert len(split_files([file], 0, SEQUENCE)["train"]) == 2


def test_cached_tokens_keep_their_split(write, tmp_path, monkeypatch):
    """A run that was split in another way can resume as long as its tokens are cached."""
    config = jsonl_config(tmp_path, ["the same line"] * 40 + ["another line."])
    with monkeypatch.context() as patch:
        patch.setattr(
            "data.text.text_files.held_out_shares",
            lambda sizes, *_: (np.arange(len(sizes)) % 3 == 0).astype(float),
        )
        before = load_text(config)
    assert load_text(config).fingerprint == before.fingerprint
