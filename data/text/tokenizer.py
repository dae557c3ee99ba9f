"""Tokenizers: raw bytes, a byte-level BPE trained on the corpus, or a tokenizer.json."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from data.locks import locked
from data.text.special_tokens import (
    ADDED,
    END_OF_TEXT,
    EOS_NAMES,
    find_sentinel_ids,
    find_special_ids,
)
from untrusted.cached import read_cached, write_cached
from untrusted.documents import read_json
from untrusted.files import read_text

# The largest tokenizer.json that is read. Large vocabularies need 35 MB.
_MAX_FILE_BYTES = 2**28

logger = logging.getLogger(__name__)

# The first character of tokens that begin a word: a space, newline, tab or carriage return as they
# are written in byte-level vocabularies, and the "▁" of SentencePiece.
_WORD_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁")
# Training keeps all words in memory, and more text than this hardly changes the vocabulary.
_MAX_BPE_CHARACTERS = 2**28
_TRAINING_BATCH = 256


class Tokenizer(Protocol):
    """The interface that the text pipeline needs from a tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        eos_id: The id of the end-of-document token; no text encodes to it.
        fingerprint: A string that changes whenever the ids of a text may change.
        source: The value of `data.tokenizer` that loads this tokenizer.
        special_ids: Use -> id, for the uses in special_tokens.NAMES that the tokenizer has.
        sentinel_ids: The ids of sentinels 0, 1, ..., which stand for removed spans.
        has_token_types: Whether token types distinguish the two texts of a row, as in BERT. RoBERTa
            has no token types, and puts two separators between the texts instead.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str
    source: str
    special_ids: Mapping[str, int]
    sentinel_ids: tuple[int, ...]
    has_token_types: bool

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts.

        Args:
            texts: The texts.

        Returns:
            For each text int32[number of tokens], without special tokens.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, with the names of special tokens."""
        ...

    def is_text(self) -> np.ndarray:
        """Return bool[vocab_size], true for the ids that text can encode to."""
        ...

    def starts_word(self) -> np.ndarray:
        """Return bool[vocab_size], true for the ids that begin a word.

        Raises:
            ValueError: The vocabulary does not mark where words begin.
        """
        ...


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes: ids 0 to 255 are bytes, and 256 ends a document.

    Args:
        has_special_tokens: Whether to add the other special tokens, with ids from 257.
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
        """Encode texts; see `Tokenizer.encode_batch`."""
        # A lone surrogate has no UTF-8 encoding. Replacing it with '?' keeps one bad document from
        # stopping a run.
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            for text in texts
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, with the names of special tokens."""
        known = [bytes([i]) for i in range(256)] + [name.encode() for name in self._names]
        content = b"".join(known[i] for i in np.asarray(ids).tolist())
        return content.decode("utf-8", "replace")

    def is_text(self) -> np.ndarray:
        """Return bool[vocab_size], true for the 256 bytes."""
        return np.arange(self.vocab_size) < 256

    def starts_word(self) -> np.ndarray:
        """Return bool[vocab_size], true for white space, which begins a word."""
        return np.isin(np.arange(self.vocab_size), list(b" \t\r\n"))


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, loaded from its JSON format.

    Args:
        content: The content of a tokenizer.json.
        source: The path of the file, as in `data.tokenizer`.

    Raises:
        ValueError: The JSON is not a tokenizer, or has no end-of-document token.
    """

    def __init__(self, content: str, source: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(
                f"data.tokenizer={source!r} is not a readable tokenizer.json ({error}); "
                "replace the file, or set data.tokenizer to 'bpe' or 'bytes'"
            ) from error
        # A file saved for a classifier may truncate or pad. A corpus needs exactly its tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # If a text contains the name of a special token, encode that name as text: it must not end
        # the document.
        self._tokenizer.encode_special_tokens = True
        token_to_id = self._tokenizer.token_to_id
        found = [name for name in EOS_NAMES if token_to_id(name) is not None]
        # RoBERTa and OPT have GPT-2's end-of-document token as an ordinary token, and a special
        # token of their own, so special tokens take precedence.
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        found.sort(key=lambda name: name not in special)
        if not found:
            raise ValueError(
                f"data.tokenizer={source!r} has none of the end-of-document tokens "
                f"{list(EOS_NAMES)}; add one of them to the file as a special token"
            )
        self.eos_id: int = token_to_id(found[0])  # pyright: ignore
        self.special_ids: Mapping[str, int] = find_special_ids(token_to_id)
        self.sentinel_ids = find_sentinel_ids(token_to_id)
        # RoBERTa encodes a pair as CLS A SEP SEP B SEP, with 4 special tokens; BERT needs only 3.
        self.has_token_types = self._tokenizer.num_special_tokens_to_add(is_pair=True) != 4
        self.source = source
        self.content = content
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts; see `Tokenizer.encode_batch`."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, with the names of special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def is_text(self) -> np.ndarray:
        """Return bool[vocab_size], true for the ids that text can encode to."""
        is_text = np.zeros(self.vocab_size, bool)
        is_text[list(self._tokenizer.get_vocab(with_added_tokens=True).values())] = True
        added = self._tokenizer.get_added_tokens_decoder()
        special = [i for i, token in added.items() if token.special]
        is_text[[*special, self.eos_id, *self.special_ids.values(), *self.sentinel_ids]] = False
        return is_text

    def starts_word(self) -> np.ndarray:
        """Return bool[vocab_size], true for the ids that begin a word.

        Raises:
            ValueError: The vocabulary does not mark where words begin.
        """
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        starts = np.zeros(self.vocab_size, bool)
        if isinstance(self._tokenizer.model, tokenizers.models.WordPiece):
            prefix = self._tokenizer.model.continuing_subword_prefix
            first = [i for token, i in vocab.items() if not token.startswith(prefix)]
        else:
            first = [i for token, i in vocab.items() if token.startswith(_WORD_MARKS)]
        if not first:
            raise ValueError(
                f"data.whole_words=True, but data.tokenizer={self.source!r} does not mark where "
                "words begin (with '##' in WordPiece, 'Ġ' in byte-level BPE or '▁' in "
                "SentencePiece); set data.whole_words=False"
            )
        starts[first] = True
        return starts


def load_tokenizer_file(path: str) -> FileTokenizer:
    """Load a tokenizer.json, or the vocab.json and merges.txt of older models.

    Args:
        path: The path of the file, or of a directory that contains these files.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a tokenizer.
    """
    file = Path(path).expanduser()
    directory = file
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        if find_tokenizer(directory) == directory:
            content = _byte_level_bpe(directory)
        else:
            content = read_text(file, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data.tokenizer={path!r}: there is no file {file}; set it to the path of a "
            "tokenizer.json, or to 'bpe' or 'bytes'"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer={path!r} cannot be read as a tokenizer.json: {error}; "
            "replace the file, or set data.tokenizer to 'bpe' or 'bytes'"
        ) from error
    return FileTokenizer(content, path)


def find_tokenizer(directory: Path) -> Path | None:
    """Return what to load as the tokenizer of a model in a directory, or None if it has none."""
    if (directory / "tokenizer.json").exists():
        return directory / "tokenizer.json"
    older = (directory / "vocab.json", directory / "merges.txt")
    return directory if all(file.is_file() for file in older) else None


def _byte_level_bpe(directory: Path) -> str:
    """Return the tokenizer.json of a byte-level BPE that is given as vocab.json and merges.txt.

    Raises:
        ValueError: A file is damaged, or leads out of the directory.
        OSError: A file cannot be read.
    """
    vocab = read_json(directory / "vocab.json", within=directory, max_bytes=_MAX_FILE_BYTES)
    text = read_text(directory / "merges.txt", within=directory, max_bytes=_MAX_FILE_BYTES)
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    config: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            config |= read_json(directory / name, within=directory)
    named = [each.get("content") if isinstance(each, dict) else each for each in config.values()]
    special = [each for each in named if isinstance(each, str) and each in vocab] or [END_OF_TEXT]
    try:
        merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # The library raises plain Exception.
        raise ValueError(f"vocab.json and merges.txt do not fit each other ({error})") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=config.get("add_prefix_space") is True
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([each for each in dict.fromkeys(special) if each in vocab])
    if "cls_token" in config and {"<s>", "</s>"} <= vocab.keys():  # two separators, as in RoBERTa
        tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])
        )
    return tokenizer.to_str()


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
        open_documents: Returns the texts to train on; called only if there is no cached file.
        file: The path of the cached tokenizer; its name identifies the corpus and the size.
        vocab_size: The maximum vocabulary size; a small corpus may yield fewer tokens.
        has_special_tokens: Whether to add special tokens other than the end of a document.

    Returns:
        The tokenizer.
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
