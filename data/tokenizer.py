"""Text to token ids and back: bytes, a BPE trained from the corpus, or a tokenizer.json."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import filelock
import numpy as np
import tokenizers

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# The names that published tokenizers give the end of a document, the commonest first.
_EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "[EOS]")
# More text than this changes a vocabulary little, and training holds all its words in memory.
_MAX_BPE_CHARACTERS = 2**28
_TRAINING_BATCH = 256


class Tokenizer(Protocol):
    """What the text pipeline asks of a tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        eos_id: The id that ends a document; no text encodes to it.
        fingerprint: Changes when the ids that a text gets may change.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32[number of tokens], without an end of document."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes"

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        # A lone surrogate has no UTF-8 form; '?' keeps one bad document from stopping a run.
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            for text in texts
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        end = END_OF_TEXT.encode()
        content = b"".join(bytes([i]) if i < 256 else end for i in np.asarray(ids).tolist())
        return content.decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from the JSON that it saves.

    Args:
        content: The text of a tokenizer.json.
        source: Where it came from, for messages.

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
        found = [name for name in _EOS_NAMES if self._tokenizer.token_to_id(name) is not None]
        if not found:
            raise ValueError(
                f"data.tokenizer={source!r} has none of the tokens {list(_EOS_NAMES)}, and one "
                "must end each document; add one of them to the file as a special token"
            )
        self.eos_id: int = self._tokenizer.token_to_id(found[0])  # pyright: ignore
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


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
    open_documents: Callable[[], Sequence[str]], file: Path, vocab_size: int
) -> FileTokenizer:
    """Returns the cached byte-level BPE, trained first if there is none.

    Processes that start together train it once, and none sees a half-written file.

    Args:
        open_documents: Returns the text to train from; called only if there is no cached file.
        file: Where the tokenizer is cached; its name tells corpus and size.
        vocab_size: Tokens at most; a small corpus may give fewer.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock"):
            if not file.exists():
                logger.info("Training a BPE tokenizer of %d tokens", vocab_size)
                temporary = file.with_suffix(".tmp")
                temporary.write_text(_train_bpe(open_documents(), vocab_size), encoding="utf-8")
                os.replace(temporary, file)
    return FileTokenizer(file.read_text(encoding="utf-8"), str(file))


def _train_bpe(documents: Sequence[str], vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
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
