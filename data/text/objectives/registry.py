"""What each objective makes of a stream of tokens."""

import numpy as np

from data.config import DataConfig
from data.examples import Examples
from data.text.objectives.causal_lm import CausalLMExamples
from data.text.objectives.masked_lm import MaskedLMExamples
from data.text.objectives.masked_lm_pairs import MaskedLMPairExamples
from data.text.objectives.span_corruption import SpanCorruptionExamples, piece_length
from data.text.tokenizer import Tokenizer


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
        return MaskedLMExamples(tokens, config, tokenizer, keep_partial=keep_partial)
    if config.objective == "masked_lm_pairs":
        return MaskedLMPairExamples(tokens, config, tokenizer)
    if config.objective == "span_corruption":
        return SpanCorruptionExamples(tokens, config, tokenizer, keep_partial=keep_partial)
    return CausalLMExamples(
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
