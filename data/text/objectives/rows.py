"""What the rows of batches are put together from: special tokens, padding, segments.

T: tokens a row.
"""

from collections.abc import Sequence

import numpy as np

from data.config import DataConfig
from data.examples import Example
from data.text.special_tokens import NAMES
from data.text.tokenizer import Tokenizer


def special_id(tokenizer: Tokenizer, use: str, config: DataConfig) -> int:
    """Returns the id of the tokenizer's token for a use in NAMES.

    Where a tokenizer has nothing to pad with, the end of a document does.

    Raises:
        ValueError: It has none.
    """
    if use == "pad":
        return tokenizer.special_ids.get(use, tokenizer.eos_id)
    if use not in tokenizer.special_ids:
        raise _missing(f"a {use} token", NAMES[use], config)
    return tokenizer.special_ids[use]


def sentinel_ids(tokenizer: Tokenizer, count: int, config: DataConfig) -> tuple[int, ...]:
    """Returns the ids of the first sentinels of the tokenizer.

    Raises:
        ValueError: It has fewer.
    """
    known = tokenizer.sentinel_ids
    if not known:
        raise _missing("sentinels", ("<extra_id_0>", "<extra_id_1>", "..."), config)
    if len(known) < count:
        raise ValueError(
            f"data.sequence_length={config.sequence_length} with data.mask_fraction="
            f"{config.mask_fraction} and data.mean_span_length={config.mean_span_length} leaves "
            f"out {count} spans, but data.tokenizer={config.tokenizer!r} has {len(known)} "
            "sentinels; shorten the sequence or lengthen the spans"
        )
    return known[:count]


def _missing(what: str, names: tuple[str, ...], config: DataConfig) -> ValueError:
    return ValueError(
        f"data.objective={config.objective!r} needs {what}, but "
        f"data.tokenizer={config.tokenizer!r} has none of {list(names)}; set data.tokenizer to "
        "'bpe', 'bytes' or a tokenizer that has, or add them to the file as special tokens"
    )


def padded(ids: np.ndarray | Sequence[int], length: int, pad: int = 0) -> np.ndarray:
    """Returns int32[length]: the ids, then padding."""
    row = np.full(length, pad, np.int32)
    row[: len(ids)] = ids
    return row


def segments(starts: np.ndarray) -> Example:
    """Returns `segment_ids`, which count from 1, and `positions`, from 0 in each: int32[T].

    Args:
        starts: bool[T], where a segment begins; the first begins the row in any case.
    """
    index = np.arange(len(starts), dtype=np.int32)
    segment_ids = np.cumsum(starts, dtype=np.int32) + np.int32(not starts[0])
    return {
        "segment_ids": segment_ids,
        "positions": index - np.maximum.accumulate(np.where(starts, index, np.int32(0))),
    }


class RowPacker:
    """Puts one text or two between special tokens: CLS text SEP, or CLS text SEP pair SEP.

    Args:
        config: Of the sequence length, T.
        tokenizer: Of the special tokens. RoBERTa's puts two SEP between texts.

    Raises:
        ValueError: The tokenizer has no CLS or no SEP.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        self.length = config.sequence_length
        self.cls, self.sep, self.pad = (
            special_id(tokenizer, use, config) for use in ("cls", "sep", "pad")
        )
        self._has_types = tokenizer.has_token_types

    def room(self, *, is_pair: bool) -> int:
        """Returns how many tokens of text a row holds."""
        return self.length - (2 if not is_pair else 3 if self._has_types else 4)

    def row(self, text: np.ndarray, pair: np.ndarray | None = None) -> Example:
        """Returns `tokens`, `segment_ids` (0 at padding) and, for a pair, `token_types`: int32[T].

        Args:
            text, pair: Ids; the longer of them is cut short until both fit.
        """
        if pair is None:
            text = text[: self.room(is_pair=False)]
            ids = np.concatenate([[self.cls], text, [self.sep]])
        else:
            text, pair = shortened(text, pair, self.room(is_pair=True))
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


def shortened(text: np.ndarray, pair: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns both without so many last tokens, of the longer first, that they fit into `room`."""
    short = min(len(text), len(pair), room // 2)
    sizes = (short, room - short) if len(text) <= len(pair) else (room - short, short)
    return text[: sizes[0]], pair[: sizes[1]]


def encoder_decoder(
    inputs: np.ndarray, outputs: np.ndarray, length: int, target_length: int, pad: int
) -> Example:
    """Returns the row of a model with encoder and decoder, which starts from padding.

    Args:
        inputs, outputs: Ids with their ends; at most `length` and `target_length` of them.
        length, target_length: S and T, tokens of the encoder and of the decoder.
        pad: Id of padding.

    Returns:
        tokens, segment_ids: int32[S]; decoder_tokens, decoder_segment_ids, targets: int32[T];
        weights: float32[T]. Segments are 1, and 0 at padding.
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
