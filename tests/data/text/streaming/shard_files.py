"""Shards of known texts, and the batches and rows that a corpus streams from them."""

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data.batches import train_batches
from data.config import DataConfig
from data.corpus import load_corpus
from data.examples import BrokenExample
from tests.data.corpora import EOS, SEED, take

#: Texts of each shard. One shard is empty, one has a single token, and some are shorter than a row.
SHARDS = [
    [f"shard {shard} text {i} " + "abcdefghij"[: (7 * shard + 3 * i) % 10] for i in range(number)]
    for shard, number in enumerate((12, 0, 1, 30, 2, 9, 17))
]
SHARDS.append(["x"])
LENGTH = 16


def tokens_of_shard(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode(), EOS)]


ALL_TOKENS = [tokens_of_shard(texts) for texts in SHARDS]
EPOCH = sum(map(len, ALL_TOKENS))


def as_lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def write_shards(directory: Path) -> str:
    """Write the shards in several formats; return the glob."""
    for number, texts in enumerate(SHARDS):
        content = as_lines(texts)
        file = directory / f"{number}.jsonl"
        if number == 3:
            pyarrow.parquet.write_table(
                pyarrow.table({"text": texts, "id": range(len(texts))}), f"{file}.parquet"
            )
        elif number == 5:
            Path(f"{file}.gz").write_bytes(gzip.compress(content.encode()))
        elif number == 6:
            rows = "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
            file.with_suffix(".csv").write_text(f"id,text\n{rows}")
        else:
            file.write_text(content)
    return str(directory / "[0-9]*")


def config_of(directory: Path, **changes) -> DataConfig:
    fields = {
        "name": "text",
        "paths": (str(directory / "[0-9]*"),),
        "tokenizer": "bytes",
        "sequence_length": LENGTH,
        "global_batch_size": 6,
        "validation_fraction": 0,
        "streaming": True,
        "shuffle_window": 8,
        "cache_dir": str(directory / "cache"),
    }
    return DataConfig(**{**fields, **changes})


@contextlib.contextmanager
def batches(config: DataConfig, rows=None, state=None, seed: int = SEED) -> Iterator:
    rows = range(config.global_batch_size) if rows is None else rows
    iterator = train_batches(load_corpus(config), config, rows, seed=seed)
    try:
        if state is not None:
            iterator.set_state(state)
        yield iterator
    finally:
        iterator.close()


def rows_of(config: DataConfig, num_rows: int, seed: int = SEED) -> np.ndarray:
    """Return the first tokens and targets, [num_rows, LENGTH + 1]."""
    with batches(config, seed=seed) as iterator:
        taken = take(iterator, -(-num_rows // config.global_batch_size))
    columns = [np.concatenate([b["tokens"][:, :1], b["targets"]], axis=1) for b in taken]
    assert all((batch["weights"] == 1).all() for batch in taken)
    return np.concatenate(columns)[:num_rows]


def refused(config: DataConfig) -> str:
    """Return the error that ends a run on these shards."""
    with batches(config) as iterator, pytest.raises(BrokenExample) as error:
        take(iterator, 100)
    return str(error.value)
