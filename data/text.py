"""A text corpus as batches of rows that do not depend on who reads them.

R: rows of the global batch that this process supplies, T: tokens a sequence.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import grain
import numpy as np

from data.batches import check_rows, iterate
from data.blend import parse_mixture
from data.chained import Chained
from data.config import RECORD_OBJECTIVES, DataConfig
from data.corpora import find_corpus
from data.examples import TRAIN, Batch, Example, Examples, Joined
from data.labelled import Answers, Labelled
from data.mixture import mixed_order, sources
from data.objectives import batch_shapes, make_examples, num_tokens_needed
from data.records import Label, RecordTexts, check_labels, open_records, scan
from data.token_store import TokenStore, load_tokens
from data.tokenizer import ByteTokenizer, Tokenizer, load_bpe, load_tokenizer_file


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """A tokenised corpus.

    Attributes:
        tokenizer: What made the tokens.
        train: Rows of the train split; only full ones of a stream.
        validation: All rows of the validation split, the last one perhaps partial; empty where
            nothing is held out.
        fingerprint: A hash of all tokens. Processes whose fingerprints differ would train on
            different text.
        labels: Of classification, in the order of `targets`; empty with other objectives.
    """

    tokenizer: Tokenizer
    train: Examples
    validation: Examples
    fingerprint: str
    labels: tuple[Label, ...] = ()


def load_corpus(config: DataConfig) -> TextCorpus:
    """Returns the corpus in tokens, built on first use and read from the cache afterwards.

    Raises:
        ValueError: The corpus or the tokenizer is unknown, broken, unfit for the objective, or too
            small for one row.
        FileNotFoundError: A glob, a token file or the tokenizer file is not there.
    """
    if config.objective in RECORD_OBJECTIVES:
        return _load_records(config)
    tokenizer, stores = load_stores(config)
    parts = [
        _make_corpus(store, each, tokenizer)
        for store, each in zip(stores, sources(config), strict=True)
    ]
    return parts[0] if config.name != "mixture" else _mixed(parts, config)


def load_stores(config: DataConfig) -> tuple[Tokenizer, list[TokenStore]]:
    """Returns the tokenizer and the tokens of each source of an objective of STREAM_OBJECTIVES.

    Raises:
        ValueError: A source or the tokenizer is unknown or broken.
        FileNotFoundError: A glob, a token file or the tokenizer file is not there.
    """
    _make_cache(config)
    # A file of the user's is checked before a corpus is downloaded or read.
    tokenizer = load_fixed_tokenizer(config)
    corpora = [find_corpus(source) for source in sources(config)]
    corpora = [replace(corpus, open=functools.cache(corpus.open)) for corpus in corpora]
    tokenizer = tokenizer or _load_bpe(
        config,
        "\0".join(corpus.key for corpus in corpora),
        lambda: Chained([corpus.open()["train"] for corpus in corpora]),
    )
    directory = config.cache_path
    return tokenizer, [load_tokens(corpus, tokenizer, directory=directory) for corpus in corpora]


def _make_corpus(store: TokenStore, config: DataConfig, tokenizer: Tokenizer) -> TextCorpus:
    train, validation = (
        make_examples(store.splits[split], config, tokenizer, keep_partial=split != "train")
        for split in ("train", "validation")
    )
    if len(train) == 0:
        raise ValueError(
            f"data.sequence_length={config.sequence_length} needs {num_tokens_needed(config)} "
            f"tokens for one sequence, but the train split of data.name={config.name!r} has "
            f"{len(store.splits['train'])}; shorten data.sequence_length or add text"
        )
    return TextCorpus(
        tokenizer=tokenizer, train=train, validation=validation, fingerprint=store.fingerprint
    )


def _mixed(parts: Sequence[TextCorpus], config: DataConfig) -> TextCorpus:
    shares = [share for share, _ in parse_mixture(config.mixture)]
    keyed = " ".join(map(str, [*shares, *(part.fingerprint for part in parts)]))
    return TextCorpus(
        tokenizer=parts[0].tokenizer,
        train=Joined([part.train for part in parts]),
        validation=Joined([part.validation for part in parts]),
        fingerprint=hashlib.sha256(keyed.encode()).hexdigest(),
    )


def _load_records(config: DataConfig) -> TextCorpus:
    _make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    splits = open_records(config)
    fingerprint, found = scan(splits)
    tokenizer = tokenizer or _load_bpe(
        config, f"records {fingerprint}", lambda: RecordTexts(splits["train"])
    )
    labels: tuple[Label, ...] = ()
    if config.objective == "classification":
        labels = check_labels(found, splits, config)
        rows = [Labelled(records, labels, config, tokenizer) for records in splits.values()]
    else:
        rows = [Answers(records, config, tokenizer) for records in splits.values()]
    keyed = f"{fingerprint} {tokenizer.fingerprint}"
    return TextCorpus(
        tokenizer=tokenizer,
        train=rows[0],
        validation=rows[1],
        fingerprint=hashlib.sha256(keyed.encode()).hexdigest(),
        labels=labels,
    )


def train_batches(
    corpus: TextCorpus, config: DataConfig, rows: Sequence[int]
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over this process's rows of the shuffled train batches.

    Row r of step k is element k * global_batch_size + r of one endless stream, shuffled anew each
    epoch, whatever the number of processes. The iterator's state counts steps, nothing else, so a
    state saved by one process continues any number of them.

    Args:
        corpus: Where the rows come from.
        config: Batch size, seed and threads.
        rows: Which rows of the global batch, 0 to global_batch_size - 1, in the wanted order.

    Returns:
        Batches of what `batch_shapes(config)` tells, with R rows of each, and index: uint32[R], the
        element's number modulo 2**32, which tells one example from the next in any order.
    """
    check_rows(rows, config.global_batch_size)
    examples, order = corpus.train, _order(corpus.train, config)

    def read(element: int) -> Example:
        # Masks and spans hang on seed and element alone, and so differ from epoch to epoch.
        return examples.example(order(element), (TRAIN, config.seed, element))

    return iterate(read, config, rows, sys.maxsize // config.global_batch_size)


def validation_batches(
    corpus: TextCorpus, config: DataConfig, rows: Sequence[int], num_batches: int | None = None
) -> grain.DatasetIterator[Batch]:
    """Returns an iterator over this process's rows of the validation batches, in order, once.

    Every row comes exactly once; rows of weight 0 fill the last batch.

    Args:
        corpus: Where the rows come from; an empty validation split gives no batches.
        config: Batch size and threads.
        rows: Which rows of the global batch, 0 to global_batch_size - 1, in the wanted order.
        num_batches: At most so many; all of them by default.

    Returns:
        Batches as those of `train_batches`, their `index` the row's number.
    """
    check_rows(rows, config.global_batch_size)
    examples, size = corpus.validation, config.global_batch_size
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in batch_shapes(config).items()}

    def read(element: int) -> Example:
        return examples[element] if element < len(examples) else empty

    all_batches = -(-len(examples) // size)
    num_batches = all_batches if num_batches is None else min(num_batches, all_batches)
    return iterate(read, config, rows, num_batches)


def _order(examples: Examples, config: DataConfig) -> Callable[[int], int]:
    """Returns what tells the row that each element of the endless stream is."""
    # Grain adds the epoch to the seed; hashing keeps seed 1 from being seed 0 an epoch later.
    seed = int(np.random.SeedSequence(config.seed).generate_state(1)[0])

    def shuffled(length: int) -> Callable[[int], int]:
        order = grain.MapDataset.range(length).shuffle(seed=seed).repeat()
        return cast(Callable[[int], int], order.__getitem__)

    if isinstance(examples, Joined):
        orders = [shuffled(len(part)) for part in examples.parts]
        return mixed_order(config, orders, examples.offsets)
    return shuffled(len(examples))


def _make_cache(config: DataConfig) -> None:
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={config.cache_dir!r}: {config.cache_path} cannot be created "
            f"({error.strerror}); set data.cache_dir to a directory that you may write"
        ) from error


def load_fixed_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer, or None if it has to be trained from the corpus."""
    if config.tokenizer == "bytes":
        return ByteTokenizer(has_special_tokens=config.has_special_tokens)
    return None if config.tokenizer == "bpe" else load_tokenizer_file(config.tokenizer)


def _load_bpe(
    config: DataConfig, corpus_key: str, open_documents: Callable[[], Sequence[str]]
) -> Tokenizer:
    key = hashlib.sha256(corpus_key.encode()).hexdigest()[:16]
    kind = "-special" if config.has_special_tokens else ""
    return load_bpe(
        open_documents,
        config.cache_path / f"bpe-{config.vocab_size}-{key}{kind}.json",
        config.vocab_size,
        has_special_tokens=config.has_special_tokens,
    )
