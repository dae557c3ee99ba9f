"""Building blocks of rows: special tokens, padding, segment ids, and packing of text pairs.

T: tokens per row.
"""

from collections.abc import Sequence

import numpy as np

from data.config import DataConfig
from data.examples import Example
from data.text.chat.conversations import EncodedChats
from data.text.tokenization.special_tokens import NAMES
from data.text.tokenization.tokenizer import Tokenizer


def special_id(tokenizer: Tokenizer, use: str, config: DataConfig) -> int:
    """Return the id of a special token.

    A tokenizer without a padding token pads with its end-of-document token.

    Args:
        use: key of special_tokens.NAMES, such as "mask".
        config: config section `data`, for the message.

    Raises:
        ValueError: The tokenizer has no such token.
    """
    if use == "pad":
        return tokenizer.special_ids.get(use, tokenizer.eos_id)
    if use not in tokenizer.special_ids:
        raise _missing(f"a {use} token", NAMES[use], config)
    return tokenizer.special_ids[use]


def sentinel_ids(tokenizer: Tokenizer, count: int, config: DataConfig) -> tuple[int, ...]:
    """Return the ids of the first `count` sentinels of a tokenizer.

    Args:
        count: number of sentinels, one per span.
        config: config section `data`, for the message.

    Raises:
        ValueError: The tokenizer has fewer sentinels.
    """
    known = tokenizer.sentinel_ids
    if not known:
        raise _missing("sentinels", ("<extra_id_0>", "<extra_id_1>", "..."), config)
    if len(known) < count:
        raise ValueError(
            f"data.sequence_length={config.sequence_length} with data.mask_fraction="
            f"{config.mask_fraction} and data.mean_span_length={config.mean_span_length} removes "
            f"{count} spans, but data.tokenizer={config.tokenizer!r} has only {len(known)} "
            "sentinels; reduce data.sequence_length or increase data.mean_span_length"
        )
    return known[:count]


def _missing(what: str, names: tuple[str, ...], config: DataConfig) -> ValueError:
    return ValueError(
        f"data.objective={config.objective!r} needs {what}, but "
        f"data.tokenizer={config.tokenizer!r} has none of {list(names)}; set data.tokenizer to "
        "'bpe', 'bytes' or a tokenizer that has one, or add one to the file as a special token"
    )


def padded(ids: np.ndarray | Sequence[int], length: int, pad: int = 0) -> np.ndarray:
    """Pad ids at the end to int32[length].

    Args:
        ids: at most `length` ids.
    """
    row = np.full(length, pad, np.int32)
    row[: len(ids)] = ids
    return row


def segments(starts: np.ndarray) -> Example:
    """Number the segments of a row, and the positions in each segment.

    For example, with a segment of 3 tokens and one of 2:

        starts       0 0 0 1 0
        segment_ids  1 1 1 2 2
        positions    0 1 2 0 1

    Args:
        starts: bool[T], true where a segment begins. The first segment begins at position 0,
            whether that is marked or not.

    Returns:
        `segment_ids: int32[T]`, counted from 1, and `positions: int32[T]`, counted from 0.
    """
    index = np.arange(len(starts), dtype=np.int32)
    segment_ids = np.cumsum(starts, dtype=np.int32) + np.int32(not starts[0])
    return {
        "segment_ids": segment_ids,
        "positions": index - np.maximum.accumulate(np.where(starts, index, np.int32(0))),
    }


def packed_chats(chats: EncodedChats, numbers: Sequence[int], length: int) -> Example:
    """Pack conversations into a row; positions restart in each.

    Args:
        numbers: numbers of those in the row, in order, which fit into it.
        length: T.

    Returns:
        `tokens`, `targets`, `segment_ids`, `positions` and `answers: int32[T]`. `segment_ids`
        counts the conversations from 1, and `answers` is the same where the target is learned, and
        0 elsewhere.
    """
    names = ("tokens", "targets", "segment_ids", "positions", "answers")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for segment, number in enumerate(numbers, 1):
        ids, is_learned = chats[number]
        parts["tokens"].append(ids[:-1])
        parts["targets"].append(ids[1:])
        parts["segment_ids"].append(np.full(len(ids) - 1, segment))
        parts["positions"].append(np.arange(len(ids) - 1))
        parts["answers"].append(np.where(is_learned[1:], segment, 0))
    return {name: padded(np.concatenate(each), length) for name, each in parts.items()}


class RowPacker:
    """Packs one or two texts into a row: CLS text SEP, or CLS text SEP pair SEP.

    Args:
        config: config section `data`, with the sequence length T.
        tokenizer: tokenizer of the special tokens. With RoBERTa's tokenizer, two SEP tokens
            separate the texts.

    Raises:
        ValueError: The tokenizer has no CLS or no SEP token.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        self.length = config.sequence_length
        self.cls, self.sep, self.pad = (
            special_id(tokenizer, use, config) for use in ("cls", "sep", "pad")
        )
        self._has_types = tokenizer.has_token_types

    def room(self, *, is_pair: bool) -> int:
        """Return the number of tokens of text that fit into a row, next to the special tokens."""
        return self.length - (2 if not is_pair else 3 if self._has_types else 4)

    def row(self, text: np.ndarray, pair: np.ndarray | None = None) -> Example:
        """Pack one or two texts; texts that are too long are truncated at the end.

        Args:
            text: ids of the first text.
            pair: ids of the second text; None for a single text.

        Returns:
            `tokens: int32[T]`, `segment_ids: int32[T]`, which is 1 at tokens and 0 at padding, and,
            for a pair, `token_types: int32[T]`, which is 1 at the second text and the SEP after it.
            If the tokenizer has no token types, they are all 0.
        """
        if pair is None:
            text = text[: self.room(is_pair=False)]
            ids = np.concatenate([[self.cls], text, [self.sep]])
        else:
            text, pair = truncate_pair(text, pair, self.room(is_pair=True))
            between = [self.sep] * (1 if self._has_types else 2)
            ids = np.concatenate([[self.cls], text, between, pair, [self.sep]])
        index = np.arange(self.length)
        row = {
            "tokens": padded(ids, self.length, self.pad),
            "segment_ids": (index < len(ids)).astype(np.int32),
        }
        if pair is not None:
            is_second = (index >= len(text) + 2) & (index < len(ids)) & self._has_types
            row["token_types"] = is_second.astype(np.int32)
        return row


def truncate_pair(text: np.ndarray, pair: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Truncate both texts, the longer one first, until together they fit.

    For example, texts of 10 and 3 tokens become 5 and 3 tokens if `room` is 8.

    Args:
        room: total number of tokens that fit.
    """
    short = min(len(text), len(pair), room // 2)
    sizes = (short, room - short) if len(text) <= len(pair) else (room - short, short)
    return text[: sizes[0]], pair[: sizes[1]]


def encoder_decoder(
    inputs: np.ndarray, outputs: np.ndarray, length: int, target_length: int, pad: int
) -> Example:
    """Build the row of an encoder-decoder model. The decoder's first input is the padding token.

    Args:
        inputs: ids for the encoder, with an end-of-document token last; at most `length`.
        outputs: ids that the decoder predicts, with an end-of-document token last; at most
            `target_length`.
        length: S, the number of tokens of the encoder.
        target_length: T, the number of tokens of the decoder.

    Returns:
        `tokens` and `segment_ids: int32[S]`; `decoder_tokens`, `decoder_segment_ids` and
        `targets: int32[T]`; `weights: float32[T]`. Segment ids are 1 at tokens and 0 at padding.
    """
    is_target = np.arange(target_length) < len(outputs)
    return {
        "tokens": padded(inputs, length, pad),
        "segment_ids": (np.arange(length) < len(inputs)).astype(np.int32),
        "decoder_tokens": padded([pad, *outputs[:-1]], target_length, pad),
        "decoder_segment_ids": is_target.astype(np.int32),
        "targets": padded(outputs, target_length, pad),
        "weights": is_target.astype(np.float32),
    }
