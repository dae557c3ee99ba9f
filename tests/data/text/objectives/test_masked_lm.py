"""Masked language modeling: number and choice of masked tokens, targets, isolated documents."""

import numpy as np
import pytest

from data.batches import train_batches, validation_batches
from data.text.text_corpus import load_text
from tests.data.corpora import (
    CLS,
    EOS,
    MASK,
    SEED,
    SEP,
    byte_level,
    documents,
    jsonl_config,
    sentence_piece,
    tokens_of,
    word_piece,
)

TOKENIZERS = {"word_piece": word_piece, "byte_level": byte_level, "bytes": lambda _: "bytes"}


def masked_config(directory, **changes):
    return jsonl_config(directory, documents(), **{"objective": "masked_lm", **changes})


def split_tokens(directory, split, **changes):
    """Return the token array of a split without its first end-of-document token."""
    changes = {**changes, "objective": "causal_lm", "sequence_length": 1}
    corpus = load_text(masked_config(directory, **changes))
    return tokens_of(corpus.train if split == "train" else corpus.validation)[1:]


def test_masked_rows_contain_the_stream_between_cls_and_sep(tmp_path):
    corpus = load_text(masked_config(tmp_path))
    stream = split_tokens(tmp_path, "train")
    assert len(corpus.train) == len(stream) // 30 > 50
    for i in range(len(corpus.train)):
        targets = corpus.train[i]["targets"]
        assert (targets[0], targets[-1]) == (CLS, SEP)
        np.testing.assert_array_equal(targets[1:-1], stream[30 * i : 30 * i + 30])


def test_masking_hides_the_documented_fractions_and_targets_restore_them(tmp_path):
    corpus = load_text(masked_config(tmp_path, sequence_length=200))
    counts = np.zeros(3)
    for epoch in range(40):
        for i in range(len(corpus.train)):
            row = corpus.train.example(i, (0, 7, epoch * len(corpus.train) + i))
            tokens = row["tokens"]
            targets = row["targets"]
            chosen = row["weights"] == 1
            assert set(row["weights"]) == {0, 1}
            np.testing.assert_array_equal(np.where(chosen, targets, tokens), targets)
            # No special token is chosen, and no special token but MASK replaces a token.
            assert not (targets[chosen] >= 256).any()
            assert (tokens[chosen] <= 255).sum() + (tokens[chosen] == MASK).sum() == chosen.sum()
            assert chosen.sum() == round(0.15 * (targets < 256).sum())
            is_mask = tokens[chosen] == MASK
            is_same = tokens[chosen] == targets[chosen]
            counts += is_mask.sum(), is_same.sum(), (~is_mask & ~is_same).sum()
    total = counts.sum()
    assert total > 5000
    # One random replacement in 256 happens to be the token itself.
    for count, share in zip(counts, (0.8, 0.1 + 0.1 / 256, 0.1 * 255 / 256), strict=True):
        assert abs(count - share * total) < 5 * np.sqrt(total * share * (1 - share))


def test_all_tokens_are_chosen_with_equal_probability(tmp_path):
    corpus = load_text(masked_config(tmp_path))
    num_draws = 2000
    share = 4 / 28
    row = next(i for i in range(99) if (corpus.train[i]["targets"] < 256).sum() == 28)
    draws = [corpus.train.example(row, (k,))["weights"] for k in range(num_draws)]
    times = np.sum(draws, axis=0)
    times = times[corpus.train[row]["targets"] < 256]
    bound = 5 * np.sqrt(num_draws * share * (1 - share))
    assert (abs(times - num_draws * share) < bound).all()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_whole_words_are_never_split(kind, tmp_path):
    path = TOKENIZERS[kind](tmp_path)
    config = masked_config(tmp_path, tokenizer=path, whole_words=True, sequence_length=64)
    corpus = load_text(config)
    tokenizer = corpus.tokenizer
    assert tokenizer.starts_word().sum() > 0
    shares = []
    num_split = 0
    num_apart = 0
    for i in range(len(corpus.train)):
        row = corpus.train[i]
        targets = row["targets"].tolist()
        chosen = row["weights"] == 1
        words = []
        is_text = tokenizer.is_text()
        for place, token in enumerate(targets):
            if not is_text[token]:
                words.append(None)
                continue
            text = tokenizer.decode([token])
            continues = text.startswith("##") if kind == "word_piece" else text[0] != " "
            if words and words[-1] is not None and continues:
                words[-1].append(place)
            else:
                words.append([place])
        for word in filter(None, words):
            assert len(set(chosen[word])) == 1, [tokenizer.decode([targets[i]]) for i in word]
            num_split += len(word) > 1 and chosen[word[0]]
        for before, between, after in zip(words, words[1:], words[2:], strict=False):
            if before and between is None and after:
                num_apart += chosen[before[0]] != chosen[after[0]]
        shares.append(chosen.sum() / is_text[targets].sum())
    assert num_split > 3
    assert num_apart > 3  # An end of document separates words: each of them is chosen by itself.
    assert abs(np.mean(shares) - 0.15) < 0.02  # A word is at most 12 of 62 tokens.


def test_whole_words_require_a_vocabulary_that_marks_them(tmp_path):
    import tokenizers

    vocab = {"</s>": 0, "<s>": 1, "<mask>": 2, "a": 3, "[UNK]": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "t.json"))
    config = masked_config(tmp_path, tokenizer=str(tmp_path / "t.json"), whole_words=True)
    with pytest.raises(ValueError, match=r"data\.whole_words=True, but .*t\.json' does not mark"):
        load_text(config)


@pytest.mark.parametrize("objective", ["masked_lm", "masked_lm_pairs"])
def test_tokenizer_without_mask_is_refused(objective, tmp_path):
    config = masked_config(tmp_path, tokenizer=sentence_piece(tmp_path), objective=objective)
    message = (
        rf"data\.objective='{objective}' needs a mask token, but data\.tokenizer='.*piece\.json' "
        r"has none of \['\[MASK\]', '<mask>'\]; set"
    )
    with pytest.raises(ValueError, match=message):
        load_text(config)


def test_evaluation_can_choose_each_token_exactly_once(tmp_path):
    # A row has at most 30 tokens, and 0.99 of them is rounded to all of them.
    config = masked_config(tmp_path, mask_fraction=0.99)
    corpus = load_text(config)
    stream = split_tokens(tmp_path, "validation")
    assert len(stream) % 30
    batches = list(validation_batches(corpus, config, range(6)))
    targets, chosen = (
        np.concatenate([batch[key] for batch in batches]).ravel() for key in ("targets", "weights")
    )
    np.testing.assert_array_equal(targets[chosen == 1], stream[stream < 256])


def test_masks_differ_between_epochs_but_not_between_evaluations(tmp_path):
    config = masked_config(tmp_path)
    corpus = load_text(config)
    length = len(corpus.train)
    steps = 2 * length // 6 + 1
    iterator = train_batches(corpus, config, range(6), seed=SEED)
    seen = {}
    for _ in range(steps):
        batch = next(iterator)
        for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
            seen.setdefault(targets.tobytes(), []).append(weights.tobytes())
    twice = [masks for masks in seen.values() if len(masks) == 2]
    assert len(twice) > 50
    assert sum(first == second for first, second in twice) < 3
    runs = [list(validation_batches(corpus, config, range(6))) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])


def test_masks_depend_on_the_seed(tmp_path):
    # With a single row, the seed cannot change the order of rows.
    length = len(split_tokens(tmp_path, "train")) + 2
    corpus = load_text(masked_config(tmp_path, sequence_length=length))
    assert len(corpus.train) == 1
    masks = []
    for seed in (7, 7, 8):
        config = masked_config(tmp_path, sequence_length=length)
        masks.append(next(train_batches(corpus, config, [0], seed=seed))["weights"])
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0] != masks[2]).any()


def isolated(row, *, ends_before):
    """Return the segment ids and positions of a row, computed by a plain loop.

    Args:
        row: tokens of the row.
        ends_before: whether an end-of-document token belongs to the document after it.
    """
    segment = 1
    position = 0
    ids = []
    positions = []
    for place, token in enumerate(row):
        if ends_before and token == EOS and place:
            segment = segment + 1
            position = 0
        ids.append(segment)
        positions.append(position)
        position += 1
        is_last_text = place >= len(row) - 2
        if not ends_before and token == EOS and not is_last_text:
            segment = segment + 1
            position = 0
    return ids, positions


@pytest.mark.parametrize("objective", ["causal_lm", "masked_lm"])
def test_isolated_documents_have_their_own_segments_and_positions(objective, tmp_path):
    plain = masked_config(tmp_path, objective=objective, sequence_length=40)
    config = masked_config(
        tmp_path, objective=objective, sequence_length=40, isolate_documents=True
    )
    corpus = load_text(config)
    without = load_text(plain)
    num_segments = set()
    for i in range(len(corpus.train)):
        row = corpus.train[i]
        original = row["tokens" if objective == "causal_lm" else "targets"]
        ids, positions = isolated(original.tolist(), ends_before=objective == "causal_lm")
        np.testing.assert_array_equal(row["segment_ids"], ids)
        np.testing.assert_array_equal(row["positions"], positions)
        assert row["segment_ids"].dtype == row["positions"].dtype == np.int32
        num_segments.add(max(ids))
        for key, value in without.train[i].items():
            np.testing.assert_array_equal(row[key], value)
        assert without.train[i].keys() == row.keys() - {"segment_ids", "positions"}
    assert len(num_segments) > 1


def test_isolated_rows_that_end_early_are_padded_with_segment_0(tmp_path):
    config = masked_config(tmp_path, objective="causal_lm", isolate_documents=True)
    corpus = load_text(config)
    row = corpus.validation[len(corpus.validation) - 1]
    assert 0 < row["weights"].sum() < 32
    np.testing.assert_array_equal(row["segment_ids"] > 0, row["weights"] > 0)
    last = list(validation_batches(corpus, config, range(6)))[-1]
    np.testing.assert_array_equal(last["segment_ids"] > 0, last["weights"] > 0)
