"""Spans left out of a text, to be written one after another, as in T5.

S: tokens of the encoder, T: tokens of the decoder.
Source: Raffel et al. 2019 (arXiv:1910.10683), section 3.1.4; lengths and the drawing of spans are
those of its published code (t5.data.preprocessors, `random_spans_helper` and
`random_spans_noise_mask`).
"""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples, generator
from data.text.objectives.rows import encoder_decoder, sentinel_ids, special_id
from data.text.tokenizer import Tokenizer


class SpanCorruptionExamples(Examples):
    """Pieces of the stream with spans left out of them.

    The encoder reads the piece with a sentinel for each span, and the decoder writes each sentinel
    and the span it stands for; both end with an end of document. Rows are those of
    `rows.encoder_decoder`. Whole pieces fill the encoder, but for a token perhaps where about half
    of the text or more is left out.

    Args:
        tokens: uint16 or uint32 [number of tokens], an end of document first.
        config: S, T, and what is left out.
        tokenizer: Of the tokens.
        keep_partial: Keep a last piece that is shorter.

    Raises:
        ValueError: The tokenizer has too few sentinels, or T is too short for the spans.
    """

    def __init__(
        self, tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer, *, keep_partial: bool
    ):
        self._tokens, self._config = tokens[1:], config
        self._piece, self._target_length = piece_length(config), target_length(config)
        num_spans = span_counts(self._piece, config)[1]
        self._sentinels = np.array(sentinel_ids(tokenizer, num_spans, config), np.int32)
        self._pad, self._eos = special_id(tokenizer, "pad", config), tokenizer.eos_id
        whole, rest = divmod(len(self._tokens), self._piece)
        self._length = whole + int(keep_partial and rest > 1)  # One token has no span to leave out.

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        piece = self._tokens[index * self._piece : (index + 1) * self._piece]
        num_noise, num_spans = span_counts(len(piece), self._config)
        random = generator(key)
        noise = _lengths(num_noise, num_spans, random)
        kept = _lengths(len(piece) - num_noise, num_spans, random)
        # A piece begins with what is kept and ends with a span, as in T5's code.
        is_noise = np.repeat(np.arange(2 * num_spans) % 2 == 1, np.stack([kept, noise], 1).ravel())
        starts, sentinels = np.cumsum(kept + noise) - noise, self._sentinels[:num_spans]
        # The encoder sees the sentinel where the span began.
        inputs, is_input = piece.astype(np.int32), ~is_noise
        inputs[starts], is_input[starts] = sentinels, True
        outputs = np.insert(piece[is_noise].astype(np.int32), np.cumsum(noise) - noise, sentinels)
        return encoder_decoder(
            np.append(inputs[is_input], self._eos),
            np.append(outputs, self._eos),
            self._config.sequence_length,
            self._target_length,
            self._pad,
        )


def span_counts(num_tokens: int, config: DataConfig) -> tuple[int, int]:
    """Returns how many of at least 2 tokens are left out, and in how many spans."""
    noise = min(max(round(num_tokens * config.mask_fraction), 1), num_tokens - 1)
    spans = max(round(noise / config.mean_span_length), 1)
    return noise, min(spans, num_tokens - noise)  # Something is kept before each span.


def piece_length(config: DataConfig) -> int:
    """Returns how many tokens of text fill the encoder once spans are left out."""
    length = 2
    while _lengths_of(length + 1, config)[0] <= config.sequence_length:
        length += 1
    return length


def target_length(config: DataConfig) -> int:
    """Returns T: `data.target_length`, or what the spans of a piece need.

    Raises:
        ValueError: The former is less than the latter.
    """
    needed = _lengths_of(piece_length(config), config)[1]
    if config.target_length is not None and config.target_length < needed:
        raise ValueError(
            f"data.target_length={config.target_length} is less than the {needed} tokens that "
            f"data.sequence_length={config.sequence_length} with data.mask_fraction="
            f"{config.mask_fraction} and data.mean_span_length={config.mean_span_length} leaves to "
            f"the decoder; set data.target_length to None, or to {needed} or more"
        )
    return config.target_length or needed


def _lengths_of(num_tokens: int, config: DataConfig) -> tuple[int, int]:
    """Returns how many tokens the encoder and the decoder get of a piece, with their ends."""
    noise, spans = span_counts(num_tokens, config)
    return num_tokens - noise + spans + 1, noise + spans + 1


def _lengths(num_tokens: int, num_parts: int, random: np.random.Generator) -> np.ndarray:
    """Returns int[num_parts], at least 1 each, that sum to `num_tokens`; all such are alike."""
    cuts = random.choice(num_tokens - 1, num_parts - 1, replace=False) + 1
    return np.diff(np.sort(cuts), prepend=0, append=num_tokens)
