"""Rows of labeled examples: pairs of source and target texts, or texts with a label."""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples
from data.text.objectives.rows import RowPacker, encoder_decoder, special_id
from data.text.records import Label, Records
from data.text.tokenization.tokenizer import Tokenizer


class Seq2SeqExamples(Examples):
    """Rows with a source text for the encoder and a target text for the decoder.

    Both texts are truncated to their lengths and end with an end-of-document token. A row has the
    keys that `rows.encoder_decoder` returns.

    Args:
        config: config section `data`, with the lengths S of the encoder and T of the decoder.
    """

    def __init__(self, records: Records, config: DataConfig, tokenizer: Tokenizer):
        self._records = records
        self._tokenizer = tokenizer
        self._length = config.sequence_length
        self._target_length = config.target_length or config.sequence_length
        self._pad = special_id(tokenizer, "pad", config)

    def __len__(self) -> int:
        return len(self._records)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; nothing in it is random."""
        del key
        lengths = self._length, self._target_length
        encoded = self._tokenizer.encode_batch(self._records.read(index)[0])
        inputs, outputs = (
            np.append(ids[: length - 1], self._tokenizer.eos_id)
            for ids, length in zip(encoded, lengths, strict=True)
        )
        return encoder_decoder(inputs, outputs, *lengths, self._pad)


class ClassificationExamples(Examples):
    """Rows with a text or a pair of texts, and one label.

    A row has the keys that `rows.RowPacker.row` returns, `targets: int32`, the index of the label
    in `labels`, and `weights: float32`, which is 1.

    Args:
        labels: all labels, in order.
        config: config section `data`, with the sequence length T.

    Raises:
        ValueError: The tokenizer has no CLS or no SEP token.
    """

    def __init__(
        self, records: Records, labels: tuple[Label, ...], config: DataConfig, tokenizer: Tokenizer
    ):
        self._records = records
        self._tokenizer = tokenizer
        self._number: dict[Label | None, int] = {label: i for i, label in enumerate(labels)}
        self._joiner = RowPacker(config, tokenizer)

    def __len__(self) -> int:
        return len(self._records)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`; nothing in it is random."""
        del key
        texts, label = self._records.read(index)
        return {
            **self._joiner.row(*self._tokenizer.encode_batch(texts)),
            "targets": np.array(self._number[label], np.int32),
            "weights": np.array(1, np.float32),
        }
