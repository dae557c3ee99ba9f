"""Mixtures: weights hold for every prefix of the stream, and each source keeps its own order."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import train_batches, validation_batches
from data.blend import Blend, parse_mixture, weighted_token_files
from data.config import DataConfig
from data.text.text_corpus import load_text
from data.text.token_files import write_token_file
from tests.data.corpora import SEED, documents, jsonl_config


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    start=st.integers(0, 10**12),
)
def test_shares_of_every_prefix_are_exact_to_one_element(weights, start):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    blend = Blend(shares)
    counts = [0] * len(shares)
    for element in range(2 * sum(weights) + 3):
        source, number = blend[element]
        assert number == counts[source]
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - (element + 1) * share) < 1
    # A far element is found without computing the ones before it, and its number is consistent.
    source, number = blend[start]
    assert abs(number - start * shares[source]) < 1


def test_weights_are_relative_and_exact():
    assert parse_mixture(("0.7 wiki40b/en", " 0.3  python_stdlib ")) == [
        (Fraction(7, 10), "wiki40b/en"),
        (Fraction(3, 10), "python_stdlib"),
    ]
    assert [share for share, _ in parse_mixture(("2 a", "1 my texts/*.txt", "1. c"))] == [
        Fraction(1, 2),
        Fraction(1, 4),
        Fraction(1, 4),
    ]


def mixture_config(directory, **changes):
    paths = []
    for name, count in (("one", 80), ("two", 25)):
        texts = [f"{name}: {text}" for text in documents(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
        paths.append(str(directory / f"{name}.jsonl"))
    fields = {
        "name": "mixture",
        "paths": (),
        "mixture": (f"0.3 {paths[0]}", f"0.7 {paths[1]}"),
    }
    return jsonl_config(directory, ["unread"], **{**fields, **changes})


def alone(directory, source, **changes):
    config = mixture_config(directory)
    path = config.mixture[source].split(maxsplit=1)[1]
    return mixture_config(directory, name="text", mixture=(), paths=(path,), **changes)


@pytest.mark.parametrize("objective", ["causal_lm", "masked_lm"])
def test_mixture_keeps_the_order_of_each_source(objective, tmp_path):
    config = mixture_config(tmp_path, objective=objective)
    corpus = load_text(config)
    singles = [alone(tmp_path, i, objective=objective) for i in range(2)]
    originals = "tokens" if objective == "causal_lm" else "targets"

    def stream(corpus, config, steps):
        batches = train_batches(corpus, config, range(6), seed=SEED)
        return [row.tobytes() for _ in range(steps) for row in next(batches)[originals]]

    mixed = stream(corpus, config, 60)
    orders = [iter(stream(load_text(each), each, 60)) for each in singles]
    blend = Blend([Fraction(3, 10), Fraction(7, 10)])
    for element, row in enumerate(mixed):
        assert row == next(orders[blend[element][0]])


def test_mixture_validates_on_its_sources_in_sequence(tmp_path):
    config = mixture_config(tmp_path, objective="masked_lm")
    singles = [load_text(alone(tmp_path, i, objective="masked_lm")) for i in range(2)]
    expected = [part.validation[i] for part in singles for i in range(len(part.validation))]
    corpus = load_text(config)
    assert len(corpus.validation) == len(expected)
    batches = list(validation_batches(corpus, config, range(6)))
    for key in ("tokens", "targets", "weights"):
        rows = np.concatenate([batch[key] for batch in batches])
        np.testing.assert_array_equal(rows[: len(expected)], [row[key] for row in expected])
        assert not rows[len(expected) :].any()
    assert corpus.fingerprint not in {part.fingerprint for part in singles}
    (tmp_path / "moved").mkdir()
    assert load_text(mixture_config(tmp_path / "moved")).fingerprint == corpus.fingerprint


def test_mixture_resumes_on_any_number_of_processes(tmp_path):
    config = mixture_config(tmp_path)
    corpus = load_text(config)
    whole = train_batches(corpus, config, range(6), seed=SEED)
    expected = [next(whole) for _ in range(12)][7:]
    iterator = train_batches(corpus, config, [2], seed=SEED)
    for _ in range(7):
        next(iterator)
    resumed = train_batches(corpus, config, [5, 0, 1], seed=SEED)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    for batch in expected:
        found = next(resumed)
        for key in batch:
            np.testing.assert_array_equal(found[key], batch[key][[5, 0, 1]])


def test_mixture_trains_one_tokenizer_from_all_sources(tmp_path):
    config = mixture_config(tmp_path, tokenizer="bpe", vocab_size=400)
    tokenizer = load_text(config).tokenizer
    for text in ("one:", "two:"):
        assert len(tokenizer.encode_batch([text])[0]) < 3


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        (("python_stdlib",), r"'python_stdlib' must be a weight above 0, a space and a source"),
        (("0 a",), r"'0 a' must be a weight above 0"),
        (("-1 a",), r"'-1 a' must be a weight above 0"),
        (("1e9 a",), r"'1e9 a' must be a weight above 0"),
        (("0.1234567 a", "1 b"), r"a common denominator of at most 100,000; round them"),
    ],
)
def test_invalid_mixtures_are_rejected(mixture, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        mixture_config(tmp_path, mixture=mixture)


@pytest.mark.parametrize(
    "paths", [("0.7 {0}/a 0.3 {0}/b.idx",), ("0.7", "{0}/a", "0.3", "{0}/b.bin")]
)
def test_token_files_are_mixed_in_the_spelling_of_megatron(paths, tmp_path):
    for name, token in (("a", 5), ("b", 6), ("v", 7)):
        documents = [np.full(40, token)] * 5
        write_token_file(str(tmp_path / name), documents, np.dtype(np.uint16))
    config = DataConfig(
        name="megatron",
        paths=tuple(path.format(tmp_path) for path in paths),
        validation_paths=(str(tmp_path / "v"),),
        tokenizer="bytes",
        global_batch_size=10,
        sequence_length=4,
        cache_dir=str(tmp_path / "cache"),
    )
    assert config.mixture == (f"0.7 {tmp_path}/a.bin", f"0.3 {tmp_path}/b.bin")
    assert (config.name, config.paths) == ("mixture", ())
    corpus = load_text(config)
    batch = next(train_batches(corpus, config, range(10), seed=SEED))
    assert sorted(row.max() for row in batch["targets"] % 256) == [5] * 7 + [6] * 3
    assert corpus.validation[0]["targets"].tolist() == [7] * 4


@pytest.mark.parametrize("paths", [("1",), ("a b",), ("0.7 a", "b"), ("a", "b")])
def test_other_paths_are_no_mixture(paths):
    assert weighted_token_files(paths) == ()
