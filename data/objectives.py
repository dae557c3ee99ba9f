"""What each objective makes of a stream of tokens, and the shape of its batches."""

import numpy as np

from data.config import DataConfig
from data.examples import Examples
from data.masking import MaskedWindows
from data.pairs import Pairs
from data.spans import Spans, piece_length, target_length
from data.tokenizer import Tokenizer
from data.windows import Windows


def make_examples(
    tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer, *, keep_partial: bool
) -> Examples:
    """Returns the rows that an objective of STREAM_OBJECTIVES makes of a split.

    Args:
        tokens: uint16 or uint32 [number of tokens]: one end of document, then every document
            followed by one.
        config: The objective, and its settings.
        tokenizer: Of the tokens.
        keep_partial: Keep what is left at the end and fills no row.

    Raises:
        ValueError: The tokenizer lacks what the objective needs, or lengths do not fit.
    """
    if config.objective == "masked_lm":
        return MaskedWindows(tokens, config, tokenizer, keep_partial=keep_partial)
    if config.objective == "masked_lm_pairs":
        return Pairs(tokens, config, tokenizer)
    if config.objective == "span_corruption":
        return Spans(tokens, config, tokenizer, keep_partial=keep_partial)
    return Windows(
        tokens,
        config.sequence_length,
        keep_partial=keep_partial,
        isolate_after=tokenizer.eos_id if config.isolate_documents else None,
    )


def num_tokens_needed(config: DataConfig) -> int:
    """Returns how many tokens of a stream, ends of documents included, give a first row."""
    length = config.sequence_length
    if config.objective == "span_corruption":
        return piece_length(config) + 1
    return {"masked_lm": length - 1, "masked_lm_pairs": 4}.get(config.objective, length + 1)


def batch_shapes(config: DataConfig) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns the shape of an example and the dtype of every key of the batches but `index`.

    Raises:
        ValueError: `data.target_length` is too short.
    """

    def array(dtype: type, *shape: int) -> tuple[tuple[int, ...], np.dtype]:
        return shape, np.dtype(dtype)

    length = config.sequence_length
    ids = array(np.int32, length)
    if config.objective in ("span_corruption", "seq2seq"):
        is_spans = config.objective == "span_corruption"
        decoder_length = target_length(config) if is_spans else config.target_length or length
        return {
            "tokens": ids,
            "segment_ids": ids,
            "decoder_tokens": array(np.int32, decoder_length),
            "decoder_segment_ids": array(np.int32, decoder_length),
            "targets": array(np.int32, decoder_length),
            "weights": array(np.float32, decoder_length),
        }
    if config.objective == "classification":
        types = {"token_types": ids} if config.pair_field else {}
        label = {"targets": array(np.int32), "weights": array(np.float32)}
        return {"tokens": ids, "segment_ids": ids, **types, **label}
    shapes = {"tokens": ids, "targets": ids, "weights": array(np.float32, length)}
    if config.objective == "masked_lm_pairs":
        shapes |= {"segment_ids": ids, "token_types": ids}
        shapes |= {"labels": array(np.int32), "label_weights": array(np.float32)}
    if config.isolate_documents:
        shapes |= {"segment_ids": ids, "positions": ids}
    return shapes
