"""The span corruption objective of T5: the decoder predicts spans removed from the text.

With <0> and <1> for sentinels and E for the end-of-document token:

    text      Thank you for inviting me to your party last week
    removed             ^^^^^^^^^^^^                  ^^^^^^^^^
    encoder   Thank you <0> me to your party <1> E
    decoder   <0> for inviting <1> last week E

As in T5's code, a piece always begins with text that is kept and ends with a removed span.

S: tokens of the encoder, T: tokens of the decoder.

Source: Raffel et al. 2019 (arXiv:1910.10683), section 3.1.4. Lengths, and the way spans are drawn,
follow the published code (t5.data.preprocessors, `random_spans_helper` and
`random_spans_noise_mask`).
"""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples, generator
from data.text.objectives.rows import encoder_decoder, sentinel_ids, special_id
from data.text.tokenization.tokenizer import Tokenizer


class SpanCorruptionExamples(Examples):
    """Rows for span corruption: pieces of the token array from which random spans are removed.

    The encoder reads the piece with a sentinel in place of each span. The decoder predicts each
    sentinel, followed by its span. Both end with an end-of-document token. A row has the keys that
    `rows.encoder_decoder` returns. A full piece fills the encoder, except that one token may be
    padding if about half of the text or more is removed.

    Args:
        tokens: uint16 or uint32 [number of tokens], beginning with an end-of-document token.
        config: config section `data`, with S, T and the settings of the spans.
        keep_partial: whether to keep a last piece that is shorter than the others.

    Raises:
        ValueError: The tokenizer has too few sentinels, or T is too short for the spans.
    """

    def __init__(
        self, tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer, *, keep_partial: bool
    ):
        self._tokens = tokens[1:]
        self._config = config
        self._piece = piece_length(config)
        self._target_length = target_length(config)
        num_spans = span_counts(self._piece, config)[1]
        self._sentinels = np.array(sentinel_ids(tokenizer, num_spans, config), np.int32)
        self._pad = special_id(tokenizer, "pad", config)
        self._eos = tokenizer.eos_id
        whole, remainder = divmod(len(self._tokens), self._piece)
        # From a single token no span can be removed.
        self._length = whole + int(keep_partial and remainder > 1)

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; `key` decides which spans are removed."""
        piece = self._tokens[index * self._piece : (index + 1) * self._piece]
        num_noise, num_spans = span_counts(len(piece), self._config)
        random = generator(key)
        noise = _lengths(num_noise, num_spans, random)
        kept_lengths = _lengths(len(piece) - num_noise, num_spans, random)
        # Kept parts and spans alternate. For example, kept_lengths=[2, 1] and noise=[1, 2] give
        # is_noise=[0, 0, 1, 0, 1, 1].
        is_noise = np.repeat(
            np.arange(2 * num_spans) % 2 == 1, np.stack([kept_lengths, noise], 1).ravel()
        )
        starts = np.cumsum(kept_lengths + noise) - noise
        sentinels = self._sentinels[:num_spans]
        # In the encoder, the sentinel replaces the first token of its span.
        inputs = piece.astype(np.int32)
        is_input = ~is_noise
        inputs[starts] = sentinels
        is_input[starts] = True
        outputs = np.insert(piece[is_noise].astype(np.int32), np.cumsum(noise) - noise, sentinels)
        return encoder_decoder(
            np.append(inputs[is_input], self._eos),
            np.append(outputs, self._eos),
            self._config.sequence_length,
            self._target_length,
            self._pad,
        )


def span_counts(num_tokens: int, config: DataConfig) -> tuple[int, int]:
    """Return how many tokens of a piece are removed, and in how many spans.

    Args:
        num_tokens: length of the piece, at least 2.
    """
    noise = min(max(round(num_tokens * config.mask_fraction), 1), num_tokens - 1)
    spans = max(round(noise / config.mean_span_length), 1)
    # At least one token must be kept before each span.
    return noise, min(spans, num_tokens - noise)


def piece_length(config: DataConfig) -> int:
    """Return the number of tokens of text that fill the encoder after spans are removed.

    For example, with T5's sequence_length=512, mask_fraction=0.15 and mean_span_length=3, this is
    568 tokens; the decoder then needs 114.
    """
    length = 2
    while _lengths_of(length + 1, config)[0] <= config.sequence_length:
        length += 1
    return length


def target_length(config: DataConfig) -> int:
    """Return T: `data.target_length`, or, if that is None, the length that the spans need.

    Raises:
        ValueError: `data.target_length` is less than the length that the spans need.
    """
    needed = _lengths_of(piece_length(config), config)[1]
    if config.target_length is not None and config.target_length < needed:
        raise ValueError(
            f"data.target_length={config.target_length} is less than the {needed} decoder tokens "
            f"that data.sequence_length={config.sequence_length} needs with data.mask_fraction="
            f"{config.mask_fraction} and data.mean_span_length={config.mean_span_length}; set "
            f"data.target_length to None, or to {needed} or more"
        )
    return config.target_length or needed


def _lengths_of(num_tokens: int, config: DataConfig) -> tuple[int, int]:
    """Return the lengths of a piece's encoder and decoder sequences, including their ends."""
    noise, spans = span_counts(num_tokens, config)
    return num_tokens - noise + spans + 1, noise + spans + 1


def _lengths(num_tokens: int, num_parts: int, random: np.random.Generator) -> np.ndarray:
    """Draw int[num_parts], each at least 1, that sum to `num_tokens`.

    All such compositions are equally likely.
    """
    # Choose distinct places to cut; the parts are the distances between neighboring cuts.
    cuts = random.choice(num_tokens - 1, num_parts - 1, replace=False) + 1
    return np.diff(np.sort(cuts), prepend=0, append=num_tokens)
