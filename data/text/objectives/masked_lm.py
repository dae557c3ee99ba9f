"""Masked tokens to be restored, as in BERT and RoBERTa.

T: tokens a row.
Source: Devlin et al. 2018 (arXiv:1810.04805), sections 3.1 and A.1; Liu et al. 2019
(arXiv:1907.11692), section 4.2, "full sentences".
"""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples, generator
from data.text.objectives.rows import segments, special_id
from data.text.tokenizer import Tokenizer

# Of the chosen tokens, so many become the mask, and so many another token; the rest are kept.
_MASKED, _REPLACED = 0.8, 0.1


class TokenMasker:
    """Chooses tokens of a row and hides them.

    Args:
        config: How many tokens, and whether by whole words.
        tokenizer: Of the tokens.

    Raises:
        ValueError: The tokenizer has no mask token, or does not mark words.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        self._fraction = config.mask_fraction
        self._mask_id = special_id(tokenizer, "mask", config)
        self._is_text = tokenizer.is_text()
        self._text_ids = np.flatnonzero(self._is_text).astype(np.int32)
        self._starts_word = tokenizer.starts_word() if config.whole_words else None

    def __call__(
        self, row: np.ndarray, random: np.random.Generator, *, first: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row with tokens hidden, and which were chosen: int32[T], float32[T].

        Args:
            row: int32[T].
            random: What is drawn comes from here.
            first: No token before this place is chosen; nor is any special token.
        """
        may_be = self._is_text[row]
        may_be[:first] = False
        chosen = self._choose(row, may_be, random)
        draw = random.random(len(row))
        other = self._text_ids[random.integers(len(self._text_ids), size=len(row))]
        hidden = np.where(chosen & (draw < _MASKED), np.int32(self._mask_id), row)
        is_replaced = chosen & (draw >= _MASKED) & (draw < _MASKED + _REPLACED)
        return np.where(is_replaced, other, hidden), chosen.astype(np.float32)

    def _choose(
        self, row: np.ndarray, may_be: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Returns bool[T]: as near as whole units allow to the fraction, and at least one unit."""
        places = np.flatnonzero(may_be)
        chosen = np.zeros(len(row), bool)
        if not len(places):
            return chosen
        units = self._units(row, may_be, places)
        sizes = np.bincount(units)
        order = random.permutation(len(sizes))
        wanted = round(self._fraction * len(places))
        # A unit is taken if more than half of it is within what is wanted.
        middles = np.cumsum(sizes[order]) - sizes[order] / 2
        taken = np.zeros(len(sizes), bool)
        taken[order[: max(int(np.searchsorted(middles, wanted)), 1)]] = True
        chosen[places] = taken[units]
        return chosen

    def _units(self, row: np.ndarray, may_be: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns the number of the word, or of the token, at each of the places."""
        if self._starts_word is None:
            return np.arange(len(places))
        starts = self._starts_word[row]
        starts[1:] |= ~may_be[:-1]  # After a special token.
        starts[places[0]] = True
        return np.cumsum(starts[places]) - 1


class MaskedLMExamples(Examples):
    """The stream in pieces between CLS and SEP; documents are separated by their ends.

    Its rows are tokens, targets: int32[T]; weights: float32[T], 1 at the chosen tokens; and if
    documents are isolated, segment_ids and positions, int32[T]. An end belongs to the document
    before it. A stream shorter than a piece gives none.

    Args:
        tokens: uint16 or uint32 [number of tokens], an end of document first.
        config: T, and what is chosen.
        tokenizer: Of the tokens.
        keep_partial: Keep what is left at the end: the last piece begins earlier, and no token is
            chosen in it that was in the piece before.
    """

    def __init__(
        self, tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer, *, keep_partial: bool
    ):
        self._tokens = tokens[1:]
        self._room = config.sequence_length - 2
        self._masking = TokenMasker(config, tokenizer)
        self._cls, self._sep = (special_id(tokenizer, use, config) for use in ("cls", "sep"))
        self._eos = tokenizer.eos_id if config.isolate_documents else None
        whole, rest = divmod(len(self._tokens), self._room)
        self._length = whole + int(keep_partial and whole > 0 and rest > 0)

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        start = min(index * self._room, len(self._tokens) - self._room)
        row = np.empty(self._room + 2, np.int32)
        row[0], row[-1] = self._cls, self._sep
        row[1:-1] = self._tokens[start : start + self._room]
        first = 1 + index * self._room - start
        tokens, weights = self._masking(row, generator(key), first=first)
        example = {"tokens": tokens, "targets": row, "weights": weights}
        if self._eos is not None:
            ends = row[1:-2] == self._eos
            example |= segments(np.concatenate([[False, False], ends, [False]]))
        return example
