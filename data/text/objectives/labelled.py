"""Rows of examples with answers: a text to write, or a label."""

import numpy as np

from data.config import DataConfig
from data.examples import Example, Examples
from data.text.objectives.rows import RowPacker, encoder_decoder, special_id
from data.text.records import Label, Records
from data.text.tokenizer import Tokenizer


class Seq2SeqExamples(Examples):
    """Texts for the encoder and answers for the decoder, cut short where they are too long.

    Its rows are those of `rows.encoder_decoder`; text and answer end with an end of document.

    Args:
        records: The examples.
        config: S and T, tokens of the encoder and of the decoder.
        tokenizer: Of the texts.
    """

    def __init__(self, records: Records, config: DataConfig, tokenizer: Tokenizer):
        self._records, self._tokenizer = records, tokenizer
        self._length = config.sequence_length
        self._target_length = config.target_length or config.sequence_length
        self._pad = special_id(tokenizer, "pad", config)

    def __len__(self) -> int:
        return len(self._records)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        del key  # Nothing is random.
        lengths = self._length, self._target_length
        encoded = self._tokenizer.encode_batch(self._records.read(index)[0])
        inputs, outputs = (
            np.append(ids[: length - 1], self._tokenizer.eos_id)
            for ids, length in zip(encoded, lengths, strict=True)
        )
        return encoder_decoder(inputs, outputs, *lengths, self._pad)


class ClassificationExamples(Examples):
    """Texts, or pairs of texts, each with one label for the row.

    Its rows are those of `rows.Joiner.row`, and targets: int32, the label's place among the labels;
    weights: float32, 1.

    Args:
        records: The examples.
        labels: All labels, in order.
        config: T.
        tokenizer: Of the texts.

    Raises:
        ValueError: The tokenizer lacks CLS or SEP.
    """

    def __init__(
        self, records: Records, labels: tuple[Label, ...], config: DataConfig, tokenizer: Tokenizer
    ):
        self._records, self._tokenizer = records, tokenizer
        self._number: dict[Label | None, int] = {label: i for i, label in enumerate(labels)}
        self._joiner = RowPacker(config, tokenizer)

    def __len__(self) -> int:
        return len(self._records)

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        del key  # Nothing is random.
        texts, label = self._records.read(index)
        return {
            **self._joiner.row(*self._tokenizer.encode_batch(texts)),
            "targets": np.array(self._number[label], np.int32),
            "weights": np.array(1, np.float32),
        }
