"""The interface of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """The interface that the text pipeline needs from a tokenizer.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: id of the end-of-document token; no text encodes to it.
        fingerprint: string that changes whenever the ids of a text may change.
        source: value of `data.tokenizer` that loads this tokenizer.
        token_names: names of the special tokens, by their keys in tokenizer_config.json, such
            as "eos_token".
        special_ids: use -> id, for the uses in special_tokens.NAMES that the tokenizer has.
        sentinel_ids: ids of sentinels 0, 1, ..., which stand for removed spans.
        has_token_types: whether token types distinguish the two texts of a row, as in BERT. RoBERTa
            has no token types, and puts two separators between the texts instead.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str
    source: str
    token_names: Mapping[str, str]
    special_ids: Mapping[str, int]
    sentinel_ids: tuple[int, ...]
    has_token_types: bool

    @property
    def content(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode each text as int32[number of tokens], without special tokens."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text in which the names of special tokens stand for these tokens.

        Returns:
            int32[n], the ids, and int64[n, 2], the first character and the end of each token.
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
