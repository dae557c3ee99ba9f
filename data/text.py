"""A text corpus as batches of packed sequences that do not depend on who reads them.

R: rows of the global batch that this process supplies, T: tokens a sequence.
"""

import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np

from data.config import DataConfig
from data.corpora import Corpus, find_corpus
from data.token_store import load_tokens
from data.tokenizer import ByteTokenizer, Tokenizer, load_bpe, load_tokenizer_file

# Batches read ahead of the step: enough to hide one slow read of a network disk.
_PREFETCHED_BATCHES = 8

Batch = dict[str, np.ndarray]


class Windows(Sequence[Batch]):
    """A token array cut into sequences: window i predicts tokens i*T+1 to i*T+T.

    Args:
        tokens: uint16 or uint32 [number of tokens].
        sequence_length: T.
        keep_partial: Keep a last window that is shorter than T, padded with weight 0.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, *, keep_partial: bool):
        self.tokens, self.sequence_length = tokens, sequence_length
        num_targets = max(len(tokens) - 1, 0)
        self._length = (
            -(-num_targets // sequence_length) if keep_partial else num_targets // sequence_length
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return {key: value[0] for key, value in self.gather([index]).items()}

    def gather(self, indices: Sequence[int]) -> Batch:
        """Returns the windows as rows; an index past the last window gives a row of weight 0.

        Returns:
            tokens: int32[R, T], targets: int32[R, T], weights: float32[R, T].
        """
        length = self.sequence_length
        packed = np.zeros((len(indices), length + 1), np.int32)
        weights = np.zeros((len(indices), length), np.float32)
        for row, index in enumerate(indices):
            window = self.tokens[index * length : index * length + length + 1]
            packed[row, : len(window)] = window
            weights[row, : max(len(window) - 1, 0)] = 1.0
        return {
            "tokens": np.ascontiguousarray(packed[:, :-1]),
            "targets": np.ascontiguousarray(packed[:, 1:]),
            "weights": weights,
        }


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """A tokenised corpus.

    Attributes:
        tokenizer: What made the tokens.
        train: Full windows of the train split.
        validation: All windows of the validation split, the last one perhaps partial; empty
            where nothing is held out.
        fingerprint: A hash of all tokens. Processes whose fingerprints differ would train on
            different text.
    """

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
    fingerprint: str


def load_corpus(config: DataConfig) -> TextCorpus:
    """Returns the corpus in tokens, built on first use and read from the cache afterwards.

    Raises:
        ValueError: The corpus or the tokenizer is unknown, broken, or too small for one window.
        FileNotFoundError: A glob or the tokenizer file is not there.
    """
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={config.cache_dir!r}: {config.cache_path} cannot be created "
            f"({error.strerror}); set data.cache_dir to a directory that you may write"
        ) from error
    # A file of the user's is checked before the corpus is downloaded or read.
    tokenizer = _load_fixed_tokenizer(config.tokenizer)
    corpus = find_corpus(config)
    open_once = functools.cache(corpus.open)
    if tokenizer is None:
        file = config.cache_path / _bpe_file_name(corpus, config.vocab_size)
        tokenizer = load_bpe(lambda: open_once()["train"], file, config.vocab_size)
    store = load_tokens(open_once, tokenizer, corpus_key=corpus.key, directory=config.cache_path)
    length = config.sequence_length
    train = Windows(store.splits["train"], length, keep_partial=False)
    if len(train) == 0:
        raise ValueError(
            f"data.sequence_length={length} needs {length + 1} tokens for one sequence, but the "
            f"train split of data.name={config.name!r} has {len(train.tokens)}; "
            "shorten data.sequence_length or add text"
        )
    return TextCorpus(
        tokenizer=tokenizer,
        train=train,
        validation=Windows(store.splits["validation"], length, keep_partial=True),
        fingerprint=store.fingerprint,
    )


def train_batches(
    corpus: TextCorpus, config: DataConfig, rows: Sequence[int]
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over this process's rows of the shuffled train batches.

    Row r of step k is element k * global_batch_size + r of one endless stream, shuffled anew each
    epoch, whatever the number of processes. The iterator's state counts steps, nothing else, so a
    state saved by one process continues any number of them.

    Args:
        corpus: Where the windows come from.
        config: Batch size, seed and threads.
        rows: Which rows of the global batch, 0 to global_batch_size - 1, in the wanted order.

    Returns:
        Batches of tokens, targets: int32[R, T]; weights: float32[R, T]; and index: uint32[R], the
        element's number modulo 2**32, which tells one example from the next in any order.
    """
    _check_rows(rows, config.global_batch_size)
    # Grain adds the epoch to the seed; hashing keeps seed 1 from being seed 0 an epoch later.
    seed = int(np.random.SeedSequence(config.seed).generate_state(1)[0])
    order = grain.MapDataset.range(len(corpus.train)).shuffle(seed=seed).repeat()
    num_batches = sys.maxsize // config.global_batch_size
    return _iterate(
        _Batches(corpus.train, order, config.global_batch_size, rows, num_batches), config
    )


def validation_batches(
    corpus: TextCorpus, config: DataConfig, rows: Sequence[int], num_batches: int | None = None
) -> grain.DatasetIterator[Batch]:
    """Returns an iterator over this process's rows of the validation batches, in order, once.

    Every window comes exactly once; rows of weight 0 fill the last batch.

    Args:
        corpus: Where the windows come from; an empty validation split gives no batches.
        config: Batch size and threads.
        rows: Which rows of the global batch, 0 to global_batch_size - 1, in the wanted order.
        num_batches: At most so many; all of them by default.

    Returns:
        Batches as those of `train_batches`, their `index` the window's number.
    """
    _check_rows(rows, config.global_batch_size)
    windows, size = corpus.validation, config.global_batch_size
    all_batches = -(-len(windows) // size)
    num_batches = all_batches if num_batches is None else min(num_batches, all_batches)
    order = range(num_batches * size)
    return _iterate(_Batches(windows, order, size, rows, num_batches), config)


class _Batches(Sequence[Batch]):
    """This process's rows of batch k, by k.

    Args:
        windows: Where the rows come from.
        order: The number of the window that each element is.
        global_batch_size: Elements a batch.
        rows: Which of them to supply.
        num_batches: The length.
    """

    def __init__(
        self,
        windows: Windows,
        order: "Sequence[int] | grain.MapDataset[int]",
        global_batch_size: int,
        rows: Sequence[int],
        num_batches: int,
    ):
        self._windows, self._order = windows, order
        self._rows = tuple(int(row) for row in rows)
        self._global_batch_size, self._num_batches = global_batch_size, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        elements = [index * self._global_batch_size + row for row in self._rows]
        batch = self._windows.gather([self._order[element] for element in elements])
        batch["index"] = np.array([element % 2**32 for element in elements], np.uint32)
        return batch


def _iterate(batches: Sequence[Batch], config: DataConfig) -> grain.DatasetIterator[Batch]:
    options = grain.ReadOptions(
        num_threads=config.num_threads, prefetch_buffer_size=_PREFETCHED_BATCHES
    )
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


def _check_rows(rows: Sequence[int], global_batch_size: int) -> None:
    if (
        len(rows) == 0
        or len(set(rows)) != len(rows)
        or not 0 <= min(rows) <= max(rows) < global_batch_size
    ):
        raise ValueError(
            f"rows={list(rows)} must be different numbers from 0 to data.global_batch_size - 1 = "
            f"{global_batch_size - 1}, at least one; pass the rows that this process holds"
        )


def _load_fixed_tokenizer(name: str) -> Tokenizer | None:
    """Returns the tokenizer, or None if it has to be trained from the corpus."""
    if name == "bytes":
        return ByteTokenizer()
    return None if name == "bpe" else load_tokenizer_file(name)


def _bpe_file_name(corpus: Corpus, vocab_size: int) -> str:
    key = hashlib.sha256(corpus.key.encode()).hexdigest()[:16]
    return f"bpe-{vocab_size}-{key}.json"
