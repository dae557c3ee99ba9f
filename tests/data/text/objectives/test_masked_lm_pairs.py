"""Pairs of texts: labels are correct, and in half of the pairs the second follows the first."""

import numpy as np
import pytest
import tokenizers

from data.text.text_corpus import load_text
from tests.data.corpora import byte_level, jsonl_config, word_piece

SPECIALS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CLS = 1
SEP = 2
NUM_DOCUMENTS = 40


def pairs_config(directory, **changes):
    """Return a config of documents whose words, `DOCUMENT_PLACE`, are all different."""
    texts = [[f"{d}_{i}" for i in range(3 + 5 * d)] for d in range(NUM_DOCUMENTS)]
    vocab = {word: i for i, word in enumerate([*SPECIALS, *sum(texts, [])])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(directory / "words.json"))
    fields = {
        "objective": "masked_lm_pairs",
        "sequence_length": 64,
        "tokenizer": str(directory / "words.json"),
    }
    return jsonl_config(directory, list(map(" ".join, texts)), **{**fields, **changes})


def texts_of(row):
    """Return the two texts of a row."""
    ids = row["targets"][row["segment_ids"] == 1]
    assert ids[0] == CLS and ids[-1] == SEP and (ids == SEP).sum() == 2
    cut = int(np.flatnonzero(ids == SEP)[0])
    return ids[1:cut], ids[cut + 1 : -1]


def test_labels_are_correct_and_balanced(tmp_path):
    corpus = load_text(pairs_config(tmp_path))
    labels = []
    for k in range(10):
        for i in range(len(corpus.train)):
            row = corpus.train.example(i, (k, i))
            first, second = (
                [tuple(map(int, word.split("_"))) for word in corpus.tokenizer.decode(ids).split()]
                for ids in texts_of(row)
            )
            for part in (first, second):  # Each text is a contiguous piece of one document.
                assert part == [(part[0][0], part[0][1] + j) for j in range(len(part))]
            document, place = first[-1]
            follows = second[0] == (document, place + 1)
            assert follows or second[0][0] != document
            assert row["labels"] == (0 if follows else 1) and row["label_weights"] == 1
            labels.append(int(row["labels"]))
    assert len(labels) > 500
    assert abs(np.mean(labels) - 0.5) < 5 * 0.5 / np.sqrt(len(labels))


def test_pairs_have_types_and_padding(tmp_path):
    corpus = load_text(pairs_config(tmp_path))
    num_padded = 0
    for i in range(len(corpus.train)):
        row = corpus.train[i]
        first, second = texts_of(row)
        num_tokens = len(first) + len(second) + 3
        rest = 64 - num_tokens
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * rest
        np.testing.assert_array_equal(row["token_types"], types)
        np.testing.assert_array_equal(row["segment_ids"], [1] * num_tokens + [0] * rest)
        chosen = row["weights"] == 1
        assert chosen.sum() == max(round(0.15 * (num_tokens - 3)), 1)
        assert not chosen[row["targets"] < len(SPECIALS)].any()
        num_padded += rest > 0
    assert 0 < num_padded < len(corpus.train)


@pytest.mark.parametrize("make", [word_piece, byte_level])
def test_pairs_are_joined_like_by_the_models_tokenizers(make, tmp_path):
    path = make(tmp_path)
    reference = tokenizers.Tokenizer.from_file(path)
    reference.enable_truncation(24, strategy="longest_first")
    texts = ["the quick fox", "seventeen unbelievable things over the lazy dogs", "a", "fox " * 9]
    records = [{"text": a, "pair": b, "label": len(a) % 2} for a in texts for b in texts]
    config = jsonl_config(
        tmp_path,
        records,
        objective="classification",
        tokenizer=path,
        pair_field="pair",
        sequence_length=24,
        validation_fraction=0.0,
    )
    corpus = load_text(config)
    for i, record in enumerate(records):
        expected = reference.encode(record["text"], record["pair"])
        row = corpus.train[i]
        kept = row["segment_ids"] == 1
        assert row["tokens"][kept].tolist() == expected.ids
        assert row["token_types"][kept].tolist() == expected.type_ids
        assert not kept[len(expected.ids) :].any()
        assert set(row["tokens"][~kept]) <= {corpus.tokenizer.special_ids["pad"]}


def test_one_document_gives_no_pairs(tmp_path):
    config = jsonl_config(
        tmp_path, ["alone here"], objective="masked_lm_pairs", validation_fraction=0.0
    )
    with pytest.raises(ValueError, match=r"takes second texts from other documents.*'text'"):
        load_text(config)
