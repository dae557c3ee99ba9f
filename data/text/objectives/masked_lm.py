"""The masked language modeling objective of BERT and RoBERTa: predict masked tokens.

A row is CLS, a window of T-2 tokens, SEP. A fraction of the tokens is chosen, and the loss counts
only these: 80 % of them become the mask token, 10 % a random token, and 10 % stay unchanged.

T: tokens per row.

Source: Devlin et al. 2018 (arXiv:1810.04805), sections 3.1 and A.1; Liu et al. 2019
(arXiv:1907.11692), section 4.2, "full sentences".
"""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples, generator
from data.text.objectives.rows import segments, special_id
from data.text.tokenization.tokenizer import Tokenizer

# Fractions of the chosen tokens that become the mask token and a random token; the rest are kept.
_MASKED = 0.8
_REPLACED = 0.1


class TokenMasker:
    """Chooses tokens of a row at random and masks them.

    Args:
        config: config section `data`, with `mask_fraction` and `whole_words`.

    Raises:
        ValueError: The tokenizer has no mask token, or whole words are wanted and its vocabulary
            does not mark where words begin.
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
        """Mask a row. Special tokens are never chosen.

        Args:
            row: int32[T], the tokens.
            first: first position at which tokens may be chosen.

        Returns:
            The masked row, int32[T], and float32[T], which is 1 at chosen tokens and 0 elsewhere.
        """
        # Positions that may be chosen.
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
        """Choose positions of a row.

        A unit is a word or a token. Units are chosen in random order, at least one, until their
        tokens are as close as possible to the wanted number.

        Returns:
            bool[T], true at the chosen positions; all false if none may be chosen.
        """
        places = np.flatnonzero(may_be)
        chosen = np.zeros(len(row), bool)
        if not len(places):
            return chosen
        units = self._units(row, may_be, places)
        sizes = np.bincount(units)
        order = random.permutation(len(sizes))
        wanted = round(self._fraction * len(places))
        # Line the units up in random order. A unit is chosen if its middle is below `wanted`, that
        # is, if more than half of it fits. For example, with wanted=4 and sizes 3, 2, 1 the middles
        # are 1.5, 4 and 5.5, so only the first unit is chosen.
        middles = np.cumsum(sizes[order]) - sizes[order] / 2
        taken = np.zeros(len(sizes), bool)
        taken[order[: max(int(np.searchsorted(middles, wanted)), 1)]] = True
        chosen[places] = taken[units]
        return chosen

    def _units(self, row: np.ndarray, may_be: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the number of the unit (word or token) at each of the places, counted from 0."""
        if self._starts_word is None:
            return np.arange(len(places))
        starts = self._starts_word[row]
        starts[1:] |= ~may_be[:-1]  # A token after a special token begins a word too.
        starts[places[0]] = True
        return np.cumsum(starts[places]) - 1


class MaskedLMExamples(Examples):
    """Rows for masked language modeling: windows of the token array between CLS and SEP.

    A row has `tokens` and `targets: int32[T]` and `weights: float32[T]`, which is 1 at the chosen
    tokens. If documents are isolated from each other, it also has `segment_ids` and
    `positions: int32[T]`, and an end-of-document token belongs to the document before it. A token
    array shorter than one window has no rows.

    Args:
        tokens: uint16 or uint32 [number of tokens], beginning with an end-of-document token.
        config: config section `data`, with T and the settings of masking.
        keep_partial: whether to keep the last tokens if they do not fill a window. The last window
            then begins earlier, and only tokens that are not in the window before are chosen.
    """

    def __init__(
        self, tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer, *, keep_partial: bool
    ):
        self._tokens = tokens[1:]
        self._room = config.sequence_length - 2
        self._masking = TokenMasker(config, tokenizer)
        self._cls, self._sep = (special_id(tokenizer, use, config) for use in ("cls", "sep"))
        self._eos = tokenizer.eos_id if config.isolate_documents else None
        whole, remainder = divmod(len(self._tokens), self._room)
        self._length = whole + int(keep_partial and whole > 0 and remainder > 0)

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; `key` decides which tokens are masked."""
        start = min(index * self._room, len(self._tokens) - self._room)
        row = np.empty(self._room + 2, np.int32)
        row[0] = self._cls
        row[-1] = self._sep
        row[1:-1] = self._tokens[start : start + self._room]
        # 1, for CLS, except in a partial last window.
        first = 1 + index * self._room - start
        tokens, weights = self._masking(row, generator(key), first=first)
        example = {"tokens": tokens, "targets": row, "weights": weights}
        if self._eos is not None:
            # A document begins one position after the end of the one before it. CLS belongs to the
            # first document of the row, and SEP to the last one.
            ends = row[1:-2] == self._eos
            example |= segments(np.concatenate([[False, False], ends, [False]]))
        return example
