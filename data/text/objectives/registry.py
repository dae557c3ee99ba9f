"""The choice of an objective: the rows that it builds from an array of tokens."""

import numpy as np

from data.config import DataConfig
from data.examples import Examples
from data.text.objectives.causal_lm import CausalLMExamples, WholeDocumentExamples
from data.text.objectives.masked_lm import MaskedLMExamples
from data.text.objectives.masked_lm_pairs import MaskedLMPairExamples
from data.text.objectives.span_corruption import SpanCorruptionExamples, piece_length
from data.text.tokenization.tokenizer import Tokenizer


def make_examples(
    tokens: np.ndarray, config: DataConfig, tokenizer: Tokenizer, *, keep_partial: bool
) -> Examples:
    """Build the rows of a split for an objective in STREAM_OBJECTIVES.

    Args:
        tokens: uint16 or uint32 [number of tokens]: an end-of-document token, then every document
            followed by another one.
        config: config section `data`, with the objective and its settings.
        keep_partial: whether to keep the last tokens if they do not fill a row.

    Raises:
        ValueError: The tokenizer lacks a special token that the objective needs, or the lengths in
            the config contradict each other.
    """
    if config.objective == "masked_lm":
        return MaskedLMExamples(tokens, config, tokenizer, keep_partial=keep_partial)
    if config.objective == "masked_lm_pairs":
        return MaskedLMPairExamples(tokens, config, tokenizer)
    if config.objective == "span_corruption":
        return SpanCorruptionExamples(tokens, config, tokenizer, keep_partial=keep_partial)
    if config.packing == "best_fit":
        return WholeDocumentExamples(
            tokens,
            config.sequence_length,
            tokenizer.eos_id,
            isolates=config.isolate_documents,
        )
    return CausalLMExamples(
        tokens,
        config.sequence_length,
        keep_partial=keep_partial,
        isolate_after=tokenizer.eos_id if config.isolate_documents else None,
    )


def num_tokens_needed(config: DataConfig) -> int:
    """Return the number of tokens, including ends of documents, that the first row needs."""
    length = config.sequence_length
    if config.objective == "span_corruption":
        return piece_length(config) + 1
    return {"masked_lm": length - 1, "masked_lm_pairs": 4}.get(config.objective, length + 1)
