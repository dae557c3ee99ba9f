"""A tokenizer of raw bytes, which needs no training."""

from collections.abc import Mapping, Sequence

import numpy as np
import tokenizers

from data.text.tokenization.special_tokens import (
    ADDED,
    END_OF_TEXT,
    find_sentinel_ids,
    find_special_ids,
)


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes: ids 0 to 255 are bytes, and 256 ends a document.

    Args:
        has_special_tokens: whether to add the other special tokens, with ids from 257.
    """

    eos_id = 256
    fingerprint = source = "bytes"
    token_names: Mapping[str, str] = {"eos_token": END_OF_TEXT}
    has_token_types = True

    def __init__(self, *, has_special_tokens: bool = False):
        self._names = (END_OF_TEXT, *(ADDED if has_special_tokens else ()))
        ids = {name: 256 + i for i, name in enumerate(self._names)}
        self.vocab_size = 256 + len(ids)
        self.special_ids: Mapping[str, int] = find_special_ids(ids.get)
        self.sentinel_ids = find_sentinel_ids(ids.get)

    @property
    def content(self) -> str:
        """The same tokenizer as a tokenizer.json: a byte-level BPE without merges."""
        # The library writes each byte as a printable character. Bytes that are printable stand for
        # themselves, and the other bytes for the characters from 256, in order.
        alphabet = sorted(map(ord, tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        printable = [code for code in alphabet if code < 256]
        others = sorted(set(range(256)).difference(printable))
        codes = dict(zip(alphabet, [*printable, *others], strict=True))
        vocab = {chr(code): byte for code, byte in codes.items()}
        vocab |= {name: 256 + i for i, name in enumerate(self._names)}
        whole = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        whole.decoder = tokenizers.decoders.ByteLevel()
        whole.add_special_tokens(list(self._names))
        return whole.to_str()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts; see `Tokenizer.encode_batch`."""
        # A lone surrogate has no UTF-8 encoding. Replacing it with '?' keeps one bad document from
        # stopping a run.
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            for text in texts
        ]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text with names of special tokens; see `Tokenizer.encode_with_offsets`."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for number, part in enumerate(text.split(END_OF_TEXT)):
            if number:
                end = offsets[-1][1] if offsets else 0
                offsets.append((end, end + len(END_OF_TEXT)))
                ids.append(self.eos_id)
            start = offsets[-1][1] if offsets else 0
            for i, character in enumerate(part, start):
                encoded = character.encode("utf-8", "replace")
                ids += encoded
                offsets += [(i, i + 1)] * len(encoded)
        return np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)

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
