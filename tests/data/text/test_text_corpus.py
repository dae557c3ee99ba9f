"""Packing, shuffling, sharding and resuming of text corpora, compared with plain references."""

import dataclasses
import functools
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.batches import train_batches, validation_batches
from data.config import DataConfig
from data.examples import BrokenExample
from data.text import token_store
from data.text.text_corpus import load_text
from tests.data.corpora import SEED, tokens_of

EOS = 256
DOCUMENTS = [f"document {i}: " + "abcdefgh"[: i % 8] * (i % 5) + "é" for i in range(60)]
seeded_train_batches = functools.partial(train_batches, seed=SEED)


def write_config(directory, documents=DOCUMENTS, **changes):
    (directory / "a.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in documents))
    config = DataConfig(
        name="text",
        paths=(str(directory / "a.jsonl"),),
        tokenizer="bytes",
        sequence_length=16,
        global_batch_size=6,
        validation_fraction=0.3,
        cache_dir=str(directory / "cache"),
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def corpus(config):
    return load_text(config)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_batches_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def reference_tokens(documents):
    tokens = [EOS]
    for document in documents:
        tokens += [*document.encode(), EOS]
    return np.array(tokens)


def split_documents(config):
    from data.text.documents import open_documents

    return {split: list(texts) for split, texts in open_documents(config).items()}


def test_windows_are_the_concatenated_documents(config, corpus):
    documents = split_documents(config)
    for windows, split in ((corpus.train, "train"), (corpus.validation, "validation")):
        expected = reference_tokens(documents[split])
        np.testing.assert_array_equal(tokens_of(windows), expected)
        assert tokens_of(windows).dtype == np.uint16
        for i in range((len(expected) - 1) // 16):
            np.testing.assert_array_equal(windows[i]["tokens"], expected[i * 16 : i * 16 + 16])
            np.testing.assert_array_equal(windows[i]["targets"], expected[i * 16 + 1 : i * 16 + 17])
            assert (windows[i]["weights"] == 1).all()
    assert len(corpus.train) == (len(tokens_of(corpus.train)) - 1) // 16


def test_large_token_ids_are_stored_exactly(tmp_path):
    import tokenizers

    vocab = {"</s>": 0, "[UNK]": 1, "high": 70_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = write_config(
        tmp_path, ["high high"] * 20, tokenizer=str(tmp_path), validation_fraction=0.0
    )
    windows = load_text(config).train
    assert tokens_of(windows).dtype == np.uint32
    assert windows[0]["tokens"][:4].tolist() == [0, 70_000, 70_000, 0]


def test_train_batch_has_the_documented_shapes(config, corpus):
    batch = next(train_batches(corpus, config, [4, 1], seed=SEED))
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "tokens": ((2, 16), np.int32),
        "targets": ((2, 16), np.int32),
        "weights": ((2, 16), np.float32),
        "index": ((2,), np.uint32),
    }
    assert all(value.flags.c_contiguous for value in batch.values())
    assert batch["index"].tolist() == [4, 1]


def test_train_stream_visits_each_window_once_an_epoch_in_a_new_order(config, corpus):
    number = {corpus.train[i]["tokens"].tobytes(): i for i in range(len(corpus.train))}
    assert len(number) == len(corpus.train)  # All windows of this corpus are different.
    length = len(corpus.train)
    batches = take(train_batches(corpus, config, range(6), seed=SEED), 3 * length // 6 + 1)
    order = [number[row.tobytes()] for batch in batches for row in batch["tokens"]]
    epochs = [order[i * length : (i + 1) * length] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(length))
    assert epochs[0] != list(range(length))
    assert epochs[0] != epochs[1] != epochs[2]
    index = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(index, np.arange(len(index)))


def test_train_order_depends_only_on_the_seed(config, corpus):
    first = take(train_batches(corpus, config, range(6), seed=SEED), 5)
    many_threads = dataclasses.replace(config, num_threads=5)
    assert_batches_equal(first, take(train_batches(corpus, many_threads, range(6), seed=SEED), 5))
    other = take(train_batches(corpus, config, range(6), seed=SEED + 1), 5)
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "partition",
    [
        [[0, 1, 2], [3, 4, 5]],
        [[5, 0], [1, 3], [2, 4]],
        [[0], [1], [2], [3], [4], [5]],
        [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],  # Both processes read the same rows.
    ],
)
@pytest.mark.parametrize("make", [seeded_train_batches, validation_batches])
def test_processes_read_the_rows_of_one_stream(make, partition, config, corpus):
    # 30 steps of 6 rows are more than two epochs of the train split.
    count = 30 if make is seeded_train_batches else len(list(make(corpus, config, range(6))))
    assert make is validation_batches or count * 6 > 2 * len(corpus.train)
    whole = take(make(corpus, config, range(6)), count)
    for rows in partition:
        part = take(make(corpus, config, rows), count)
        expected = [{key: value[rows] for key, value in batch.items()} for batch in whole]
        assert_batches_equal(part, expected)


@pytest.mark.parametrize("stopped_at", [0, 1, 4, 11, 25])
def test_train_batches_resume_exactly_on_any_number_of_processes(stopped_at, config, corpus):
    whole = take(train_batches(corpus, config, range(6), seed=SEED), 32)
    iterator = train_batches(corpus, config, [0, 1, 2], seed=SEED)
    take(iterator, stopped_at)
    state = json.loads(json.dumps(iterator.get_state()))
    for rows in ([0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5], [2]):
        resumed = train_batches(corpus, config, rows, seed=SEED)
        take(resumed, 3)  # Batches that were already prefetched must be dropped.
        resumed.set_state(state)
        expected = [{key: v[list(rows)] for key, v in batch.items()} for batch in whole]
        assert_batches_equal(take(resumed, 32 - stopped_at), expected[stopped_at:])


def test_validation_predicts_every_token_exactly_once(config, corpus):
    expected = reference_tokens(split_documents(config)["validation"])
    assert (len(expected) - 1) % 16 and len(corpus.validation) % 6  # Both have a remainder.
    batches = list(validation_batches(corpus, config, range(6)))
    assert all(batch["tokens"].shape == (6, 16) for batch in batches)
    weights = np.concatenate([batch["weights"] for batch in batches]).ravel()
    kept = weights == 1
    assert set(weights) == {0.0, 1.0} and kept.sum() == len(expected) - 1
    targets = np.concatenate([batch["targets"] for batch in batches]).ravel()
    tokens = np.concatenate([batch["tokens"] for batch in batches]).ravel()
    np.testing.assert_array_equal(targets[kept], expected[1:])
    np.testing.assert_array_equal(tokens[kept], expected[:-1])
    index = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(index, np.arange(len(index)))


def test_validation_batches_can_be_limited(config, corpus):
    every = list(validation_batches(corpus, config, range(6)))
    assert len(every) >= 3
    assert_batches_equal(list(validation_batches(corpus, config, range(6), 2)), every[:2])
    assert_batches_equal(list(validation_batches(corpus, config, range(6), 10**6)), every)


def test_validation_may_be_empty(tmp_path):
    config = write_config(tmp_path, validation_fraction=0.0)
    corpus = load_text(config)
    assert len(corpus.validation) == 0
    assert list(validation_batches(corpus, config, range(6))) == []


@pytest.mark.parametrize("rows", [[], [0, 0], [6], [-1]])
def test_rows_are_checked(rows, config, corpus):
    for make in (seeded_train_batches, validation_batches):
        with pytest.raises(ValueError, match=r"rows=\[.*from 0 to data\.global_batch_size - 1 = 5"):
            make(corpus, config, rows)


def test_corpus_too_short_for_one_window_is_refused(tmp_path):
    config = write_config(tmp_path, ["ab", "cd"], validation_fraction=0.0)
    message = r"data\.sequence_length=16 needs 17 tokens .*'text' has only 7; reduce"
    with pytest.raises(ValueError, match=message):
        load_text(config)
    assert len(load_text(dataclasses.replace(config, sequence_length=6)).train) == 1


def test_unwritable_cache_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"data\.cache_dir='.*cannot be created.*may write"):
        load_text(config)


def cache_files(config):
    return sorted(p for p in Path(config.cache_dir).rglob("*") if p.suffix != ".lock")


def test_cache_is_reused_and_rebuilt_when_the_corpus_changes(tmp_path):
    config = write_config(tmp_path)
    first = load_text(config)
    times = {file: file.stat().st_mtime_ns for file in cache_files(config)}
    again = load_text(dataclasses.replace(config, sequence_length=5))  # Lengths share a cache.
    assert {file: file.stat().st_mtime_ns for file in cache_files(config)} == times
    assert first.fingerprint == again.fingerprint
    changed = load_text(write_config(tmp_path, [*DOCUMENTS, "one more"]))
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "damage", ["truncate", "other token", "no meta", "broken meta", "left over"]
)
def test_damaged_cache_is_rebuilt(damage, tmp_path):
    config = write_config(tmp_path)
    fingerprint = load_text(config).fingerprint
    (store,) = [path for path in cache_files(config) if path.is_dir()]
    if damage == "truncate":
        (store / "train.bin").write_bytes((store / "train.bin").read_bytes()[:-2])
    elif damage == "other token":
        content = bytearray((store / "train.bin").read_bytes())
        content[7] ^= 1
        (store / "train.bin").write_bytes(content)
    elif damage == "no meta":
        (store / "meta.json").unlink()
    elif damage == "broken meta":
        (store / "meta.json").write_text('{"dtype"')
    else:  # As left behind by a build that was killed.
        store.rename(store.with_suffix(".tmp"))
    corpus = load_text(config)
    assert corpus.fingerprint == fingerprint
    expected = reference_tokens(split_documents(config)["train"])
    np.testing.assert_array_equal(tokens_of(corpus.train), expected)


def test_damage_of_a_large_cache_is_found_while_training(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    load_text(config)
    monkeypatch.setattr(token_store, "_VERIFIED_AT_ONCE", 0)
    (store,) = [path for path in cache_files(config) if path.is_dir()]
    content = bytearray((store / "train.bin").read_bytes())
    content[7] ^= 1
    (store / "train.bin").write_bytes(content)
    corpus = load_text(config)
    deadline = time.monotonic() + 60
    with pytest.raises(BrokenExample, match=r"cached tokens in .* are damaged .*start again"):
        while time.monotonic() < deadline:
            corpus.train[0]
    assert load_text(config).train[0] is not None


def test_damaged_tokenizer_is_trained_again(tmp_path, caplog):
    config = write_config(tmp_path, tokenizer="bpe", vocab_size=300)
    fingerprint = load_text(config).tokenizer.fingerprint
    (file,) = Path(config.cache_dir).glob("bpe-*.json")
    for damaged in (file.read_text()[:-20], file.read_text().replace('"a"', '"b"', 1), ""):
        file.write_text(damaged)
        assert load_text(config).tokenizer.fingerprint == fingerprint
    assert caplog.text.count("damaged (its SHA-256 differs), it is rebuilt") >= 3


COUNTED_CORPUS = """
import os, time

class Counted(list):
    def __getitem__(self, index):
        value = super().__getitem__(index)
        time.sleep(0.02)  # Long enough that a second builder would get between.
        with open(os.path.join(os.path.dirname(__file__), "reads"), "a") as log:
            log.write("x")
        return value

def corpus():
    texts = [f"document {i} of a corpus that counts its reads" for i in range(25)]
    return {"train": Counted(texts[:20]), "validation": Counted(texts[20:]), "fingerprint": "1"}
"""


def build_in_process(config, barrier, results):
    barrier.wait()
    results.put(load_text(config).fingerprint)


@pytest.mark.thorough
def test_processes_that_start_together_build_one_cache(tmp_path, monkeypatch):
    (tmp_path / "counted_corpus.py").write_text(COUNTED_CORPUS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = DataConfig(
        name="counted_corpus:corpus",
        vocab_size=280,
        sequence_length=16,
        global_batch_size=6,
        cache_dir=str(tmp_path / "cache"),
    )
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    results = context.Queue()
    processes = [
        context.Process(target=build_in_process, args=(config, barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    fingerprints = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert fingerprints == [load_text(config).fingerprint] * 2
    # One process read the train split to train the BPE, and one read both splits to tokenize them.
    assert len((tmp_path / "reads").read_text()) == 20 + 25
    names = [file.name for file in cache_files(config)]
    assert not [name for name in names if name.endswith(".tmp")]


def test_import_does_not_load_slow_modules():
    code = (
        "import sys, data.text.text_corpus; slow = {'tensorflow_datasets', 'tensorflow', 'torch'}; "
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
