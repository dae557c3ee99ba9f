"""Train a byte-level BPE tokenizer on the corpus, once."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from data.text.tokenization.file_tokenizer import FileTokenizer
from data.text.tokenization.special_tokens import ADDED, END_OF_TEXT
from untrusted.cached import locked, read_cached, write_cached

# Training keeps all words in memory, and more text than this hardly changes the vocabulary.
_MAX_BPE_CHARACTERS = 2**28
_TRAINING_BATCH = 256

logger = logging.getLogger(__name__)


def load_bpe(
    open_documents: Callable[[], Sequence[str]],
    file: Path,
    vocab_size: int,
    *,
    has_special_tokens: bool = False,
) -> FileTokenizer:
    """Load the byte-level BPE tokenizer from the cache, or train it if there is none.

    If several processes start together, one of them trains the tokenizer, and none reads a
    half-written file.

    Args:
        open_documents: returns the texts to train on; called only if there is no cached file.
        file: path of the cached tokenizer; its name identifies the corpus and the size.
        vocab_size: maximum vocabulary size; a small corpus may yield fewer tokens.
        has_special_tokens: whether to add special tokens other than the end of a document.
    """
    special_tokens = [END_OF_TEXT, *(ADDED if has_special_tokens else ())]
    content = read_cached(file, plain=True)
    if content is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            content = read_cached(file, plain=True)
            if content is None:
                logger.info("Training a BPE tokenizer of %d tokens", vocab_size)
                content = _train_bpe(open_documents(), vocab_size, special_tokens).encode()
                write_cached(file, content, plain=True)
    return FileTokenizer(content.decode(), str(file))


def _train_bpe(documents: Sequence[str], vocab_size: int, special_tokens: list[str]) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_batches(documents), trainer)
    return tokenizer.to_str()


def _training_batches(documents: Sequence[str]) -> Iterator[list[str]]:
    # In random order, so that the part of a large corpus that is used is a uniform sample.
    order = np.random.default_rng(0).permutation(len(documents))
    num_characters = 0
    for first in range(0, len(order), _TRAINING_BATCH):
        batch = [documents[int(i)] for i in order[first : first + _TRAINING_BATCH]]
        yield batch
        num_characters += sum(map(len, batch))
        if num_characters >= _MAX_BPE_CHARACTERS:
            return
