"""Texts and pairs of texts as rows of a classifier, built as in its training."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convert.model_on_disk import Source
from data.config import DataConfig
from data.text.objectives.rows import RowPacker
from generate.prompts import read_json_lines, tokenizer_of
from untrusted.messages import without_surrogates
from untrusted.schema import check_fields

#: Rows have a multiple of so many tokens, so that few programs are compiled.
_LENGTH_MULTIPLE = 64


def check_classifies_texts(source: Source) -> None:
    """Check that a model predicts a label for each text.

    Raises:
        ValueError: it does not.
    """
    if getattr(source.config, "head", None) != "sequence":
        raise ValueError(
            f"{source.path} is a {source.model}, which classifies neither images nor texts; train "
            "one that does with configs/vit.py or configs/bert_classify.py"
        )


def read_texts(path: Path, text_field: str, pair_field: str | None) -> list[tuple[str, ...]]:
    """Read a text, or a pair of texts, from each line of a .jsonl file.

    Args:
        text_field: field of a line that contains the text.
        pair_field: field that contains the second text of a pair; None: there are no pairs.

    Raises:
        ValueError: a line is no such object.
        OSError: the file cannot be read.
    """
    texts = []
    fields = (text_field,) if pair_field is None else (text_field, pair_field)
    for where, line in read_json_lines(path):
        check_fields(line, dict.fromkeys(fields, str), where)
        texts.append(tuple(line[field] for field in fields))
    if not texts:
        raise ValueError(f"{path} has no texts; give one per line, as {{{text_field!r}: ...}}")
    return texts


def text_rows(texts: Sequence[tuple[str, ...]], source: Source) -> list[tuple[np.ndarray, ...]]:
    """Return the arguments of the model for each text or pair: tokens, mask and token types.

    Texts that are too long are cut at the end, as in training. All rows have T tokens.

    Returns:
        For each text (int32[T], int32[T]) or, if there are pairs and the model has token types,
        (int32[T], int32[T], int32[T]).

    Raises:
        ValueError: the model has no tokenizer, or its tokenizer lacks a special token.
    """
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise ValueError(f"{source.path} has no tokenizer; classify texts with a model that has")
    encoded = [tokenizer.encode_batch([*map(without_surrogates, each)]) for each in texts]
    longest = 4 + max(sum(map(len, each)) for each in encoded)
    length = -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    config = DataConfig(
        name="text",
        paths=("texts",),
        objective="classification",
        tokenizer=str(source.tokenizer),
        sequence_length=min(length, source.config.max_positions),
        global_batch_size=1,
    )
    packer = RowPacker(config, tokenizer)
    rows = [packer.row(*each) for each in encoded]
    names = ["tokens", "segment_ids"]
    if any(len(each) > 1 for each in texts) and getattr(source.config, "num_token_types", 0):
        names.append("token_types")
    zeros = np.zeros(config.sequence_length, np.int32)
    return [tuple(row.get(name, zeros) for name in names) for row in rows]
