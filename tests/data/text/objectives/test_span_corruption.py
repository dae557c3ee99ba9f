"""Span corruption: rows contain the whole text, and lengths are the same as in T5's code."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig
from data.text.objectives.span_corruption import (
    SpanCorruptionExamples,
    piece_length,
    span_counts,
    target_length,
)
from data.text.text_corpus import load_text
from data.text.tokenization.byte_tokenizer import ByteTokenizer
from tests.data.corpora import EOS, FIRST_SENTINEL, PAD, documents, jsonl_config, sentence_piece

CONFIG = DataConfig(
    objective="span_corruption", tokenizer="bytes", sequence_length=64, global_batch_size=2
)
TOKENIZER = ByteTokenizer(has_special_tokens=True)


def restored(row):
    """Reconstruct the piece of text of a row from its encoder tokens and its targets."""
    inputs = row["tokens"][row["segment_ids"] == 1].tolist()
    outputs = row["targets"][row["weights"] == 1].tolist()
    assert inputs.pop() == EOS and outputs.pop() == EOS
    spans = {}
    number = 0
    for token in outputs:
        if token == FIRST_SENTINEL - number:
            spans[token] = []
            number += 1
        else:
            spans[FIRST_SENTINEL - number + 1].append(token)
    assert all(spans.values())
    assert [t for t in inputs if t in spans] == list(spans)  # Each sentinel once, in order.
    return [t for token in inputs for t in spans.get(token, [token])]


@settings(max_examples=60, deadline=None)
@given(
    fraction=st.floats(0.02, 0.6),
    mean=st.floats(1, 8),
    length=st.integers(8, 90),
    extra=st.integers(0, 9),
    num_tokens=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_text_is_restored_exactly(fraction, mean, length, extra, num_tokens, seed):
    config = dataclasses.replace(
        CONFIG, mask_fraction=fraction, mean_span_length=mean, sequence_length=length
    )
    config = dataclasses.replace(config, target_length=target_length(config) + extra)
    stream = np.random.default_rng(seed).integers(0, 257, num_tokens + 1).astype(np.uint16)
    examples = SpanCorruptionExamples(stream, config, TOKENIZER, keep_partial=True)
    pieces = []
    for i in range(len(examples)):
        row = examples.example(i, (seed, i))
        pieces += restored(row)
        is_target = row["weights"] == 1
        np.testing.assert_array_equal(row["decoder_segment_ids"], is_target)
        shifted = [PAD, *row["targets"][:-1]]
        np.testing.assert_array_equal(
            row["decoder_tokens"][is_target], np.array(shifted)[is_target]
        )
        assert set(row["targets"][~is_target]) <= {PAD}
        if i < num_tokens // piece_length(config):
            # A full piece fills the encoder, except for one token if much of the text is removed.
            assert (row["segment_ids"] == 0).sum() <= (fraction > 0.45)
            assert is_target.sum() == target_length(config) - extra
    assert num_tokens - len(pieces) in (0, 1)
    assert pieces == stream[1 : 1 + len(pieces)].tolist()


def test_lengths_equal_the_reference_code_of_t5():
    # t5.data.preprocessors.random_spans_helper(512, 0.15, 3, 1, 1) returns (568, 114).
    config = dataclasses.replace(CONFIG, sequence_length=512)
    assert (piece_length(config), target_length(config)) == (568, 114)
    assert span_counts(568, config) == (85, 28)


def test_spans_vary_and_mask_the_documented_fraction(tmp_path):
    corpus = load_text(jsonl_config(tmp_path, documents(), **spans()))
    num_noise, num_spans = span_counts(piece_length(CONFIG), CONFIG)
    rows = [corpus.train.example(i, (0, i)) for i in range(len(corpus.train))]
    first_sentinels = {int(np.argmax(row["tokens"] == FIRST_SENTINEL)) for row in rows}
    assert 0 not in first_sentinels and len(first_sentinels) > 10
    for row in rows:
        targets = row["targets"][row["weights"] == 1]
        assert (targets > 260).sum() == num_spans
        assert len(targets) == num_noise + num_spans + 1


def spans(**changes):
    return {"objective": "span_corruption", "sequence_length": 64, **changes}


def test_tokenizer_file_like_t5s_starts_the_decoder_with_padding(tmp_path):
    path = sentence_piece(tmp_path)
    corpus = load_text(jsonl_config(tmp_path, documents(), **spans(tokenizer=path)))
    assert corpus.tokenizer.special_ids["pad"] == 0
    row = corpus.train[0]
    assert row["decoder_tokens"][0] == 0
    assert row["targets"][0] == corpus.tokenizer.sentinel_ids[0]
    assert list(corpus.tokenizer.sentinel_ids) == sorted(corpus.tokenizer.sentinel_ids)[::-1]
    text = corpus.tokenizer.decode(row["targets"])
    assert text.startswith("<extra_id_0>") and "<extra_id_1>" in text and "</s>" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_length": 9},
            r"data\.target_length=9 is less than the 14 decoder tokens .*=64.* or more",
        ),
        (
            {"sequence_length": 400},
            r"sequence_length=400 .* 22 spans.* has only 5 sentinels; reduce",
        ),
    ],
)
def test_spans_that_exceed_the_sequence_are_rejected(changes, message, tmp_path):
    path = sentence_piece(tmp_path)
    config = jsonl_config(tmp_path, documents(), **spans(tokenizer=path, **changes))
    with pytest.raises(ValueError, match=message):
        load_text(config)


def test_tokenizer_without_sentinels_is_refused(tmp_path):
    from tests.data.corpora import word_piece

    config = jsonl_config(tmp_path, documents(), **spans(tokenizer=word_piece(tmp_path)))
    with pytest.raises(ValueError, match=r"'span_corruption' needs sentinels.*<extra_id_0>"):
        load_text(config)
