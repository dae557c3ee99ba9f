"""Examples in .jsonl lines: pairs of source and target texts, and texts with labels."""

import numpy as np
import pytest

from data.batches import validation_batches
from data.text import text_files
from data.text.text_corpus import load_text
from tests.data.corpora import CLS, EOS, PAD, SEP, jsonl_config, sentence_piece

ANSWERS = [{"text": f"question {i}" * (1 + i % 3), "target": f"answer {i}"} for i in range(20)]


def test_seq2seq_rows_are_texts_and_answers(tmp_path):
    config = jsonl_config(
        tmp_path, ANSWERS, objective="seq2seq", sequence_length=24, target_length=8
    )
    corpus = load_text(config)
    assert len(corpus.train) + len(corpus.validation) == 20 and len(corpus.validation)
    answers = {record["text"].encode()[:23]: record["target"].encode()[:7] for record in ANSWERS}
    for examples in (corpus.train, corpus.validation):
        for i in range(len(examples)):
            row = examples[i]
            inputs = row["tokens"][row["segment_ids"] == 1]
            outputs = row["targets"][row["weights"] == 1]
            assert (inputs[-1], outputs[-1]) == (EOS, EOS)
            assert answers[bytes(inputs[:-1].tolist())] == bytes(outputs[:-1].tolist())
            shifted = [PAD, *outputs[:-1]]
            decoder = row["decoder_tokens"]
            np.testing.assert_array_equal(decoder[row["decoder_segment_ids"] == 1], shifted)
            assert set(row["tokens"][row["segment_ids"] == 0]) <= {PAD}
    batch = next(validation_batches(corpus, config, range(6)))
    assert batch["tokens"].shape == (6, 24) and batch["targets"].shape == (6, 8)


def labelled(labels, count=30):
    return [{"text": f"text {i}", "label": labels[i % len(labels)]} for i in range(count)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["neutral", "yes", "no"], ("neutral", "no", "yes")), ([10, 9, -1], (-1, 9, 10))],
)
def test_labels_are_found_and_numbered_in_order(labels, expected, tmp_path):
    records = labelled(labels)
    corpus = load_text(jsonl_config(tmp_path, records, objective="classification"))
    assert corpus.labels == expected
    by_text = {record["text"]: record["label"] for record in records}
    for examples in (corpus.train, corpus.validation):
        for i in range(len(examples)):
            row = examples[i]
            ids = row["tokens"][row["segment_ids"] == 1]
            assert (ids[0], ids[-1]) == (CLS, SEP)
            assert by_text[bytes(ids[1:-1].tolist()).decode()] == expected[row["targets"]]
            assert row["targets"].dtype == np.int32 and row["weights"] == 1


def test_long_texts_are_truncated(tmp_path):
    records = [{"text": "x" * 99, "label": i % 2} for i in range(8)]
    config = jsonl_config(tmp_path, records, objective="classification", validation_fraction=0.0)
    row = load_text(config).train[0]
    assert row["tokens"].tolist() == [CLS, *b"x" * 30, SEP]
    assert (row["segment_ids"] == 1).all()


def test_bpe_of_records_is_trained_with_special_tokens(tmp_path):
    config = jsonl_config(tmp_path, ANSWERS, objective="seq2seq", tokenizer="bpe", vocab_size=400)
    tokenizer = load_text(config).tokenizer
    assert {"pad", "cls", "sep", "mask"} == set(tokenizer.special_ids)
    assert len(tokenizer.sentinel_ids) == 100
    # It was trained on both the source and the target texts.
    assert len(tokenizer.encode_batch(["answer"])[0]) < 4 > len(tokenizer.encode_batch(["ion"])[0])


def test_fingerprint_depends_on_the_data_and_the_tokenizer(tmp_path):
    def fingerprint(records, **changes):
        # No validation split, because the hash of a line decides its split.
        changes = {"objective": "seq2seq", "validation_fraction": 0.0, **changes}
        return load_text(jsonl_config(tmp_path, records, **changes)).fingerprint

    first = fingerprint(ANSWERS)
    assert fingerprint([record | {"unread": 1} for record in ANSWERS]) == first
    for key in ("text", "target"):
        assert fingerprint([*ANSWERS[:-1], ANSWERS[-1] | {key: "other"}]) != first
    assert fingerprint(ANSWERS, tokenizer=sentence_piece(tmp_path)) != first
    labels = [fingerprint(labelled(ab), objective="classification") for ab in ("ab", "ba")]
    assert labels[0] != labels[1]


GOOD = labelled(["a", "b"], 4)


@pytest.mark.parametrize(
    ("objective", "records", "message"),
    [
        ("seq2seq", [{"text": "a", "target": "b"}, {"text": "c"}], r"a\.jsonl line 2: the field"),
        (
            "seq2seq",
            [{"text": "a", "target": " "}],
            r"line 1: .*'target' \(data\.target_field\) is e",
        ),
        (
            "seq2seq",
            [{"text": "", "target": "b"}],
            r"line 1: .*'text' \(data\.text_field\) is empty",
        ),
        ("seq2seq", [{"target": "b"}], r"line 1 has the fields \['target'\].*data\.text_field"),
        (
            "classification",
            [*GOOD, {"text": "x"}],
            r"a\.jsonl line 5 has .*data\.label_field='label'",
        ),
        (
            "classification",
            [*GOOD, {"text": "x", "label": 1.5}],
            r"line 5 has .*no string or whole",
        ),
        (
            "classification",
            [*GOOD, {"text": "x", "label": True}],
            r"line 5 has .*no string or whole",
        ),
        (
            "classification",
            [*GOOD, {"text": "x", "label": 1}],
            r"at least two labels .*all strings or all .*but has 'a', 'b', 1",
        ),
        ("classification", GOOD[::2], r"at least two labels in the train split, .*but has 'a';"),
    ],
)
def test_invalid_records_are_rejected(objective, records, message, tmp_path):
    config = jsonl_config(tmp_path, records, objective=objective, validation_fraction=0.0)
    with pytest.raises(ValueError, match=message):
        load_text(config)


def test_label_that_occurs_only_in_validation_is_rejected(tmp_path, monkeypatch):
    records = labelled(["a", "b"], 40) + [{"text": f"rare {i}", "label": "c"} for i in range(40)]
    is_rare = np.array([record["label"] == "c" for record in records])
    monkeypatch.setattr(text_files, "held_out_shares", lambda *_: is_rare.astype(float))
    config = jsonl_config(tmp_path, records, objective="classification")
    with pytest.raises(ValueError, match=r"a\.jsonl line \d+ is held out and has the label 'c'"):
        load_text(config)


def test_records_are_read_from_jsonl_only(tmp_path):
    (tmp_path / "b.txt").write_text("text")
    config = jsonl_config(tmp_path, ANSWERS, objective="seq2seq", paths=(str(tmp_path / "*.*"),))
    with pytest.raises(
        ValueError, match=r"b\.txt', but data\.objective='seq2seq' reads only \.jsonl"
    ):
        load_text(config)
