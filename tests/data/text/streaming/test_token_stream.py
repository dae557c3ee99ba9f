"""Streamed text against the plain concatenation of its shards, which these tests compute."""

import contextlib
import gzip
import json
import os
from pathlib import Path

import pytest

from data.config import DataConfig
from data.corpus import load_corpus
from data.examples import BrokenExample
from tests.data.corpora import EOS, SEED, assert_rows, take, tokens_of
from tests.data.text.streaming.shard_files import (
    ALL_TOKENS,
    EPOCH,
    LENGTH,
    as_lines,
    batches,
    config_of,
    refused,
    rows_of,
    tokens_of_shard,
    write_shards,
)
from tests.data.text.streaming.watching import watching


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory)
    return directory


def order_in(tokens: list[int]) -> list[int]:
    """Return which shards an epoch's tokens concatenate, each once, without the empty ones."""
    order = []
    left = {number for number, shard in enumerate(ALL_TOKENS) if shard}
    while left:
        number = next(n for n in left if tokens[: len(ALL_TOKENS[n])] == ALL_TOKENS[n])
        tokens = tokens[len(ALL_TOKENS[number]) :]
        order.append(number)
        left.remove(number)
    assert not tokens
    return order


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_of_each_shard_are_used_exactly_once_per_epoch(directory, seed):
    """In the order of reading, with `shuffle_window=1`: rows predict the concatenated shards."""
    rows = rows_of(config_of(directory, shuffle_window=1), 3 * EPOCH // LENGTH, seed)
    stream = rows[:, 1:].ravel().tolist()
    assert rows[0, 0] == EOS and (rows[1:, 0] == rows[:-1, -1]).all()
    orders = [order_in(stream[:EPOCH]), order_in(stream[EPOCH : 2 * EPOCH])]
    assert orders[0] != orders[1]


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("window", "seed"), [(2, 0), (8, 1), (1000, 0)])
def test_rows_are_shuffled_within_a_window_and_an_epoch(directory, window, seed):
    in_order = rows_of(config_of(directory, shuffle_window=1), 3 * EPOCH // LENGTH, seed).tolist()
    shuffled = rows_of(
        config_of(directory, shuffle_window=window), 3 * EPOCH // LENGTH, seed
    ).tolist()
    assert shuffled != in_order
    # Number of the first row after each epoch's last whole row.
    ends = [epoch * EPOCH // LENGTH for epoch in range(4)]
    for first, stop in zip(ends, ends[1:], strict=False):
        for start in range(first, stop, window):
            part = slice(start, min(start + window, stop))
            assert sorted(shuffled[part]) == sorted(in_order[part])


@pytest.mark.thorough
def test_processes_read_the_rows_of_one_global_batch(directory):
    config = config_of(directory)
    with batches(config) as whole, batches(config, [0, 3, 4]) as a, batches(config, [5, 1, 2]) as b:
        expected = take(whole, 40)
        assert_rows(take(a, 40), expected, [0, 3, 4])
        assert_rows(take(b, 40), expected, [5, 1, 2])
    assert expected[39]["index"].tolist() == list(range(234, 240))


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["causal_lm", "masked_lm", "span_corruption"])
def test_state_continues_with_the_same_batches_in_any_process(directory, objective):
    config = config_of(directory, objective=objective, cache_dir=str(directory / objective))
    with batches(config) as iterator:
        states = [iterator.get_state()]
        expected = []
        for _ in range(40):
            expected.append(next(iterator))
            states.append(iterator.get_state())
    for step, rows in ((0, [*range(6)]), (1, [0, 3, 4]), (17, [5, 1]), (39, [*range(6)])):
        state = json.loads(json.dumps(states[step]))
        with batches(config, rows, state) as iterator:
            assert_rows(take(iterator, 40 - step), expected[step:], rows)


@pytest.mark.thorough
def test_tokens_equal_those_of_a_corpus_that_is_not_streamed(directory):
    """Same documents, byte order marks, part sizes and line ends, for every format."""
    text = "\ufeff" + "A line of text, with an ä.\r\n" * 4000
    (directory / "9.txt").write_text(text, newline="")
    (directory / "9.txt.gz").write_bytes(gzip.compress(text.encode()))
    for file in [*directory.glob("[2-6].*"), *directory.glob("9.*")]:
        config = config_of(directory, paths=(str(file),), shuffle_window=1, global_batch_size=1)
        whole = load_corpus(
            DataConfig(
                name="text",
                paths=config.paths,
                tokenizer="bytes",
                sequence_length=LENGTH,
                global_batch_size=1,
                validation_fraction=0,
                cache_dir=config.cache_dir,
            )
        )
        tokens = tokens_of(whole.train)[: 400 * LENGTH]
        rows = rows_of(config, (len(tokens) - 1) // LENGTH)
        assert rows[:, 1:].ravel().tolist() == tokens[1 : 1 + rows[:, 1:].size].tolist()
    for file in directory.glob("9.*"):
        file.unlink()


@pytest.mark.thorough
def test_cache_does_not_exceed_its_bound(tmp_path):
    """Two processes of a run share it with another run, and all read what they would without it."""
    texts = {number: [f"{number} " * 2000] * (1 + number) for number in range(10)}
    for number, documents in texts.items():
        (tmp_path / f"{number}.jsonl").write_text(as_lines(documents))
    sizes = [2 * len(tokens_of_shard(documents)) for documents in texts.values()]  # uint16
    bound = 4 * (max(sizes) + 2**11)
    assert sum(sizes) > bound
    config = config_of(tmp_path, cache_gb=bound / 1e9, sequence_length=2000)
    with watching(tmp_path / "cache" / "streams") as measured, contextlib.ExitStack() as stack:
        iterators = [stack.enter_context(batches(config, rows)) for rows in ([0, 1], [2, 3, 4, 5])]
        iterators.append(stack.enter_context(batches(config, seed=SEED + 1)))
        first, second, other = [take(iterator, 25) for iterator in iterators]
    assert bound / 2 < max(measured) <= bound
    unbounded = config_of(tmp_path, sequence_length=2000, cache_dir=str(tmp_path / "large"))
    with batches(unbounded) as whole:
        expected = take(whole, 25)
    assert_rows(first, expected, [0, 1])
    assert_rows(second, expected, [2, 3, 4, 5])
    with batches(unbounded, seed=SEED + 1) as whole:
        assert_rows(other, take(whole, 25), slice(None))


@pytest.mark.thorough
def test_broken_shard_ends_the_run_with_its_name(tmp_path):
    write_shards(tmp_path)
    config = config_of(tmp_path)
    packed = tmp_path / "5.jsonl.gz"
    content = packed.read_bytes()
    packed.write_bytes(content[:-30])
    assert refused(config).startswith(f"data.paths: {packed} is not a whole .gz file")
    packed.write_bytes(content)
    lines = tmp_path / "4.jsonl"
    lines.write_text('{"text": "a"}\n{"text": 3}\n')
    assert refused(config).startswith(f"data.paths: {lines} line 2 has the fields ['text'], but no")
    lines.write_bytes(b'{"text": "\xff"}')
    assert refused(config).startswith(f"data.paths: {lines} is not UTF-8 text (byte 10 is 0xff)")


@pytest.mark.thorough
def test_shards_without_enough_text_for_a_row_are_refused(tmp_path):
    for number, texts in enumerate([[], ["abcdef"], []]):
        (tmp_path / f"{number}.jsonl").write_text(as_lines(texts))
    rows = rows_of(config_of(tmp_path, global_batch_size=1), 7)[
        :, 1:
    ].tolist()  # repeats the only text
    assert sum(rows, [])[: 7 * LENGTH] == (tokens_of_shard(["abcdef"]) * 20)[: 7 * LENGTH]
    (tmp_path / "1.jsonl").write_text("")
    assert "there is not enough text for one row" in refused(config_of(tmp_path))


@pytest.mark.thorough
def test_shard_that_changes_or_vanishes_ends_the_run(tmp_path):
    write_shards(tmp_path)
    config = config_of(tmp_path)
    file = tmp_path / "4.jsonl"
    with batches(config) as iterator:
        file.write_text(file.read_text() + '{"text": "more"}\n')
        with pytest.raises(BrokenExample, match=f"{file} has changed since this run started"):
            take(iterator, 100)
    with batches(config) as iterator:
        file.unlink()
        with pytest.raises(BrokenExample, match=f"{file} has been deleted since this run started"):
            take(iterator, 100)


def test_shard_larger_than_its_part_of_the_cache_is_refused(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "8.jsonl.gz").write_bytes(gzip.compress(as_lines(["a" * 2**16]).encode()))
    message = refused(config_of(tmp_path, cache_gb=1e-4))
    assert message == (
        f"data.paths: {tmp_path}/8.jsonl.gz and its tokens take more than 2.5e-05 GB, 1/4 of "
        "data.cache_gb=0.0001; increase it, divide the file, or reduce data.num_workers=2"
    )


@pytest.mark.thorough
def test_damaged_tokens_are_made_again(tmp_path):
    write_shards(tmp_path)
    config = config_of(tmp_path)
    with batches(config) as iterator:
        expected = take(iterator, 20)
    for file in (tmp_path / "cache" / "streams").glob("*.tokens"):
        content = bytearray(file.read_bytes())
        content[0] ^= 1
        file.write_bytes(content[:-1] if len(content) % 3 == 0 else content)
    # A killed process has left these.
    (tmp_path / "cache" / "streams" / "ab").mkdir()
    (tmp_path / "cache" / "streams" / "ab" / "reservation").write_text(str(10**12))
    with batches(config) as iterator:
        assert_rows(take(iterator, 20), expected, slice(None))
    assert not (tmp_path / "cache" / "streams" / "ab").exists()


@pytest.mark.thorough
def test_processes_with_limits_tokenize(tmp_path):
    write_shards(tmp_path)
    with batches(config_of(tmp_path, num_workers=3)) as iterator:
        take(iterator, 1)
        commands = [
            path.read_bytes().split(b"\0")
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"\nPPid:\t{os.getpid()}\n" in path.with_name("status").read_text()
        ]
    function = b"data.text.streaming.tokenizing:tokenize"
    assert 1 <= sum(function in command for command in commands) <= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "bpe"}, "data.tokenizer='bpe' is trained on all texts"),
        ({"validation_fraction": 0.1}, "data.validation_fraction=0.1 cannot be held out"),
        ({"packing": "best_fit"}, "data.packing='best_fit' cannot be combined"),
        ({"verify": "full"}, "data.verify='full' cannot be combined"),
        ({"objective": "masked_lm_pairs"}, "data.objective='masked_lm_pairs' cannot be combined"),
        ({"objective": "chat"}, "data.objective='chat' cannot be combined"),
        ({"name": "megatron"}, "data.name='megatron' cannot be combined"),
    ],
)
def test_config_that_cannot_be_streamed_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **changes)


def test_validation_sets_are_read_whole(directory, tmp_path):
    (tmp_path / "held_out.txt").write_text("Some text to evaluate on.\n" * 20)
    config = config_of(directory, validation_paths=(f"{tmp_path}/*.txt",), validation_fraction=0.05)
    corpus = load_corpus(config)
    assert len(corpus.train) == 0 and len(corpus.validation) == 521 // LENGTH + 1


def test_fingerprint_depends_on_names_and_sizes_of_shards(tmp_path):
    fingerprints = []
    for folder in ("a", "b"):  # the same files on another machine
        (tmp_path / folder).mkdir()
        write_shards(tmp_path / folder)
        fingerprints.append(load_corpus(config_of(tmp_path / folder)).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    (tmp_path / "b" / "1.jsonl").write_text('{"text": "more"}')
    assert load_corpus(config_of(tmp_path / "b")).fingerprint != fingerprints[0]


@pytest.mark.parametrize("number", [0, 3, 6])  # .jsonl, .parquet, .csv
def test_field_that_the_first_row_lacks_is_refused_before_any_batch(number, tmp_path):
    write_shards(tmp_path)
    (file,) = tmp_path.glob(f"{number}.*")
    where, fields = {
        0: (f"{file} line 1 has the fields ['text']", "field"),
        3: (f"{file} has the columns ['id', 'text']", "column"),
        6: (f"{file} line 2 has the fields ['id', 'text']", "field"),
    }[number]
    with pytest.raises(ValueError) as error:
        load_corpus(config_of(tmp_path, paths=(str(file),), text_field="body"))
    assert str(error.value).startswith(f"data.paths: {where}, but no ")
    assert "data.text_field='body'; set data.text_field to the " + fields in str(error.value)


def test_first_row_is_checked_in_the_first_shard_that_has_one(tmp_path):
    (tmp_path / "0.jsonl").write_text("")
    (tmp_path / "1.txt").write_text("A text has no fields.\n")
    (tmp_path / "2.jsonl").write_text('\n{"body": "a"}\n{"text": "a"}\n')
    (tmp_path / "3.jsonl").write_text('{"content": "a"}\n')
    with pytest.raises(ValueError, match=r"2\.jsonl line 2 has the fields \['body'\]"):
        load_corpus(config_of(tmp_path))
    load_corpus(config_of(tmp_path, text_field="body"))
