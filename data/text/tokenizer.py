"""Text to token ids and back: bytes, a BPE trained from the corpus, or a tokenizer.json."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import filelock
import numpy as np
import tokenizers

from data.text.special_tokens import (
    ADDED,
    END_OF_TEXT,
    EOS_NAMES,
    find_sentinel_ids,
    find_special_ids,
)

logger = logging.getLogger(__name__)

# What words begin with in byte-level vocabularies (a space, newline, tab or carriage return) and
# in those of SentencePiece.
_WORD_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁")
# More text than this changes a vocabulary little, and training holds all its words in memory.
_MAX_BPE_CHARACTERS = 2**28
_TRAINING_BATCH = 256


class Tokenizer(Protocol):
    """What the text pipeline asks of a tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        eos_id: The id that ends a document; no text encodes to it.
        fingerprint: Changes when the ids that a text gets may change.
        source: The `data.tokenizer` that loads it.
        special_ids: Of the uses in special_tokens.NAMES, those that it has a token for.
        sentinel_ids: Of the sentinels 0, 1, ... that stand for spans left out.
        has_token_types: Whether two texts of a row are told apart by token types; RoBERTa puts two
            separators between them instead.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str
    source: str
    special_ids: Mapping[str, int]
    sentinel_ids: tuple[int, ...]
    has_token_types: bool

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32[number of tokens], without an end of document."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids."""
        ...

    def is_text(self) -> np.ndarray:
        """Returns bool[vocab_size]: the ids that text may encode to."""
        ...

    def starts_word(self) -> np.ndarray:
        """Returns bool[vocab_size]: the ids that a word begins with.

        Raises:
            ValueError: The vocabulary does not tell.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document.

    Args:
        has_special_tokens: There are further ids, for the other special tokens.
    """

    eos_id = 256
    fingerprint = source = "bytes"
    has_token_types = True

    def __init__(self, *, has_special_tokens: bool = False):
        self._names = (END_OF_TEXT, *(ADDED if has_special_tokens else ()))
        ids = {name: 256 + i for i, name in enumerate(self._names)}
        self.vocab_size = 256 + len(ids)
        self.special_ids: Mapping[str, int] = find_special_ids(ids.get)
        self.sentinel_ids = find_sentinel_ids(ids.get)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        # A lone surrogate has no UTF-8 form; '?' keeps one bad document from stopping a run.
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            for text in texts
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = [bytes([i]) for i in range(256)] + [name.encode() for name in self._names]
        content = b"".join(known[i] for i in np.asarray(ids).tolist())
        return content.decode("utf-8", "replace")

    def is_text(self) -> np.ndarray:
        return np.arange(self.vocab_size) < 256

    def starts_word(self) -> np.ndarray:
        return np.isin(np.arange(self.vocab_size), list(b" \t\r\n"))


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from the JSON that it saves.

    Args:
        content: The text of a tokenizer.json.
        source: Its path.

    Raises:
        ValueError: The JSON is not a tokenizer, or has no token that ends a document.
    """

    def __init__(self, content: str, source: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(
                f"data.tokenizer={source!r} is not a readable tokenizer.json ({error}); "
                "replace the file, or set data.tokenizer to 'bpe' or 'bytes'"
            ) from error
        # Files saved for a classifier truncate or pad; a corpus needs every token, and no more.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text that spells a special token is text: it must not end its document.
        self._tokenizer.encode_special_tokens = True
        token_to_id = self._tokenizer.token_to_id
        found = [name for name in EOS_NAMES if token_to_id(name) is not None]
        # RoBERTa's and OPT's have GPT-2's end as a token like any other, and an end of their own.
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        found.sort(key=lambda name: name not in special)
        if not found:
            raise ValueError(
                f"data.tokenizer={source!r} has none of the tokens {list(EOS_NAMES)}, and one "
                "must end each document; add one of them to the file as a special token"
            )
        self.eos_id: int = token_to_id(found[0])  # pyright: ignore
        self.special_ids: Mapping[str, int] = find_special_ids(token_to_id)
        self.sentinel_ids = find_sentinel_ids(token_to_id)
        # CLS A SEP SEP B SEP, where BERT has one token less.
        self.has_token_types = self._tokenizer.num_special_tokens_to_add(is_pair=True) != 4
        self.source = source
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def is_text(self) -> np.ndarray:
        is_text = np.zeros(self.vocab_size, bool)
        is_text[list(self._tokenizer.get_vocab(with_added_tokens=True).values())] = True
        added = self._tokenizer.get_added_tokens_decoder()
        special = [i for i, token in added.items() if token.special]
        is_text[[*special, self.eos_id, *self.special_ids.values(), *self.sentinel_ids]] = False
        return is_text

    def starts_word(self) -> np.ndarray:
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        starts = np.zeros(self.vocab_size, bool)
        if isinstance(self._tokenizer.model, tokenizers.models.WordPiece):
            prefix = self._tokenizer.model.continuing_subword_prefix
            first = [i for token, i in vocab.items() if not token.startswith(prefix)]
        else:
            first = [i for token, i in vocab.items() if token.startswith(_WORD_MARKS)]
        if not first:
            raise ValueError(
                f"data.whole_words=True, but data.tokenizer={self.source!r} does not mark words "
                "('##' of WordPiece, 'Ġ' of byte-level BPE, '▁' of SentencePiece); set "
                "data.whole_words=False"
            )
        starts[first] = True
        return starts


def load_tokenizer_file(path: str) -> FileTokenizer:
    """Returns the tokenizer of a tokenizer.json, or of the directory that holds one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a tokenizer.
    """
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        content = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data.tokenizer={path!r}: there is no file {file}; give the path of a "
            "tokenizer.json, or choose 'bpe' or 'bytes'"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.tokenizer={path!r} cannot be read as a tokenizer.json: {error}; "
            "replace the file, or choose 'bpe' or 'bytes'"
        ) from error
    return FileTokenizer(content, path)


def load_bpe(
    open_documents: Callable[[], Sequence[str]],
    file: Path,
    vocab_size: int,
    *,
    has_special_tokens: bool = False,
) -> FileTokenizer:
    """Returns the cached byte-level BPE, trained first if there is none.

    Processes that start together train it once, and none sees a half-written file.

    Args:
        open_documents: Returns the text to train from; called only if there is no cached file.
        file: Where the tokenizer is cached; its name tells corpus and size.
        vocab_size: Tokens at most; a small corpus may give fewer.
        has_special_tokens: There are special tokens besides the end of a document.
    """
    special_tokens = [END_OF_TEXT, *(ADDED if has_special_tokens else ())]
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock"):
            if not file.exists():
                logger.info("Training a BPE tokenizer of %d tokens", vocab_size)
                temporary = file.with_suffix(".tmp")
                content = _train_bpe(open_documents(), vocab_size, special_tokens)
                temporary.write_text(content, encoding="utf-8")
                os.replace(temporary, file)
    return FileTokenizer(file.read_text(encoding="utf-8"), str(file))


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
    # In a random order, so that what is left out of a large corpus is left out everywhere.
    order = np.random.default_rng(0).permutation(len(documents))
    num_characters = 0
    for first in range(0, len(order), _TRAINING_BATCH):
        batch = [documents[int(i)] for i in order[first : first + _TRAINING_BATCH]]
        yield batch
        num_characters += sum(map(len, batch))
        if num_characters >= _MAX_BPE_CHARACTERS:
            return
