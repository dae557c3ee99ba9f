"""Properties of batches that hold for every text objective."""

import json

import numpy as np
import pytest

from data.batches import train_batches, validation_batches
from data.image_config import ImageConfig
from data.shapes import example_shapes
from data.text.text_corpus import load_text
from tests.data.corpora import SEED, WORDS, assert_rows, documents, jsonl_config, take

RECORDS = [
    {"text": text, "target": text[::2], "pair": WORDS[i % 7], "label": i % 3}
    for i, text in enumerate(documents())
]
CASES = {
    "causal_lm": {},
    "causal_lm, isolated": {"objective": "causal_lm", "isolate_documents": True},
    "masked_lm": {},
    "masked_lm, isolated": {"isolate_documents": True, "whole_words": True},
    "masked_lm_pairs": {},
    "span_corruption": {"target_length": 20},
    "seq2seq": {"target_length": 11},
    "classification": {},
    "classification of pairs": {"objective": "classification", "pair_field": "pair"},
}
SEQUENCE_KEYS = {"tokens", "targets", "weights"}
ENCODER_DECODER_KEYS = SEQUENCE_KEYS | {"segment_ids", "decoder_tokens", "decoder_segment_ids"}
KEYS = {
    "causal_lm": SEQUENCE_KEYS,
    "causal_lm, isolated": SEQUENCE_KEYS | {"segment_ids", "positions"},
    "masked_lm": SEQUENCE_KEYS,
    "masked_lm, isolated": SEQUENCE_KEYS | {"segment_ids", "positions"},
    "masked_lm_pairs": SEQUENCE_KEYS | {"segment_ids", "token_types", "labels", "label_weights"},
    "span_corruption": ENCODER_DECODER_KEYS,
    "seq2seq": ENCODER_DECODER_KEYS,
    "classification": SEQUENCE_KEYS | {"segment_ids"},
    "classification of pairs": SEQUENCE_KEYS | {"segment_ids", "token_types"},
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    changes = {"objective": request.param.partition(",")[0], **CASES[request.param]}
    config = jsonl_config(tmp_path, RECORDS, **changes)
    return request.param, config, load_text(config)


def test_batches_have_the_shapes_given_by_the_config(case):
    name, config, corpus = case
    shapes = example_shapes(config, ImageConfig())
    assert shapes.keys() == KEYS[name]
    expected = {key: ((4, *shape), dtype) for key, (shape, dtype) in shapes.items()}
    expected["index"] = ((4,), np.dtype(np.uint32))
    rows = [5, 0, 2, 1]
    batches = take(train_batches(corpus, config, rows, seed=SEED), 3)
    batches += list(validation_batches(corpus, config, rows))
    for batch in batches:
        assert {key: (value.shape, value.dtype) for key, value in batch.items()} == expected
        assert all(value.flags.c_contiguous for value in batch.values())
        # Every id is in the vocabulary.
        for key in ("tokens", "decoder_tokens", "targets"):
            ids = batch.get(key, np.zeros(1))
            assert 0 <= ids.min() <= ids.max() < corpus.tokenizer.vocab_size


@pytest.mark.drawn(4)
def test_batches_do_not_depend_on_processes_or_restarts(case):
    _, config, corpus = case
    whole = take(train_batches(corpus, config, range(6), seed=SEED), 40)
    assert 40 * 6 > len(corpus.train)  # The batches reach the second epoch.
    for rows in ([0, 1, 2], [5, 3, 4]):
        iterator = train_batches(corpus, config, rows, seed=SEED)
        assert_rows(take(iterator, 15), whole[:15], rows)
        state = json.loads(json.dumps(iterator.get_state()))
        resumed = train_batches(load_text(config), config, rows[:2], seed=SEED)
        take(resumed, 3)
        resumed.set_state(state)
        assert_rows(take(resumed, 25), whole[15:], rows[:2])


def test_validation_yields_each_row_once_then_rows_of_zero_weight(case):
    name, config, corpus = case
    length = len(corpus.validation)
    batches = list(validation_batches(corpus, config, range(6)))
    assert length % 6 and len(batches) == -(-length // 6)
    rows = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    for i in range(length):
        for key, value in corpus.validation[i].items():
            np.testing.assert_array_equal(rows[key][i], value)
    assert not any(values[length:].any() for key, values in rows.items() if key != "index")
    assert rows["weights"][:length].reshape(length, -1).any(axis=1).all()
