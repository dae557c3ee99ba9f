"""Examples that .jsonl lines hold, field by field."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.examples import Label
from data.text.text_files import DocumentSpans, find_files, record_of_json, split_files


class Records(Sequence[dict[str, Any]]):
    """Lines by position, read and checked on access.

    Args:
        files: The files that `spans` refers to.
        spans: Where the lines are.
        config: Names the fields.
    """

    def __init__(self, files: list[Path], spans: DocumentSpans, config: DataConfig):
        self._files, self._spans, self._config = files, spans, config
        self.text_fields = text_fields(config)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        config = self._config
        content, file, line = self._spans.read(index, self._files)
        record = record_of_json(content, file, line, config.text_field)
        for key, field in self.text_fields.items():
            value = record.get(field)
            if not isinstance(value, str) or not value.strip():
                what = "is empty" if isinstance(value, str) else "is missing or no string"
                raise ValueError(
                    f"data.paths: {file} line {line}: the field {field!r} of data.{key} {what}; "
                    f"mend the line, or set data.{key} to the field that holds the text"
                )
        if config.objective == "classification" and not _is_label(record.get(config.label_field)):
            raise ValueError(
                f"data.paths: {file} line {line} has the fields {sorted(record)}, but no string or "
                f"whole number in data.label_field={config.label_field!r}; name the field that "
                "holds the label"
            )
        return record

    def read(self, index: int) -> tuple[list[str], Label | None]:
        """Returns the line's texts, in the order of `text_fields`, and its label, if it has one."""
        record = self[index]
        texts = [record[field] for field in self.text_fields.values()]
        is_labelled = self._config.objective == "classification"
        return texts, record[self._config.label_field] if is_labelled else None

    def place(self, index: int) -> str:
        """Returns the line's file and number, for messages."""
        file_number, _, _, line = self._spans[index]
        return f"{self._files[file_number]} line {line}"


class RecordTexts(Sequence[str]):
    """All texts of each line as one document, to train a tokenizer from."""

    def __init__(self, records: Records):
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        return "\n".join(self._records.read(index)[0])


def text_fields(config: DataConfig) -> dict[str, str]:
    """Returns config key -> field, for each text that the objective reads of a line."""
    keys = ["text_field"]
    if config.objective == "seq2seq":
        keys.append("target_field")
    elif config.pair_field:
        keys.append("pair_field")
    return {key: getattr(config, key) for key in keys}


def open_records(config: DataConfig) -> dict[str, Records]:
    """Returns the lines of `data.paths` in two splits, found but not read.

    Raises:
        FileNotFoundError: A glob matches nothing.
        ValueError: A file is no .jsonl, or there are too few lines for the splits.
    """
    files = find_files(config.paths)
    others = [str(file) for file in files if file.suffix != ".jsonl"]
    if others:
        raise ValueError(
            f"data.paths matches {others[0]!r}, but data.objective={config.objective!r} reads "
            ".jsonl files only; narrow the glob or convert the file"
        )
    splits = split_files(files, config.validation_fraction)
    return {split: Records(files, spans, config) for split, spans in splits.items()}


def scan(splits: dict[str, Records]) -> tuple[str, dict[str, list[Label | None]]]:
    """Returns a hash of all lines and the labels of each split's, having checked each line.

    Raises:
        ValueError: A line lacks a field, or a text is empty.
    """
    digest = hashlib.sha256()
    labels = {}
    for split, records in splits.items():
        digest.update(f"{split} {len(records)}\0".encode())
        labels[split] = []
        for index in range(len(records)):
            texts, label = records.read(index)
            digest.update(repr((texts, label)).encode())
            labels[split].append(label)
    return digest.hexdigest(), labels


def check_labels(
    labels: dict[str, list[Label | None]], splits: dict[str, Records], config: DataConfig
) -> tuple[Label, ...]:
    """Returns the labels of the train split, each once, sorted.

    Raises:
        ValueError: There is but one, or they are of two types, or validation has another.
    """
    known = set(labels["train"])
    if len({type(label) for label in known}) != 1 or len(known) < 2:
        some = sorted(map(repr, known))[:4]
        raise ValueError(
            f"data.label_field={config.label_field!r} has the labels {', '.join(some)} in the "
            "train split, and needs at least two, all strings or all whole numbers; mend the "
            "files, or name another field"
        )
    for index, label in enumerate(labels["validation"]):
        if label not in known:
            raise ValueError(
                f"data.paths: {splits['validation'].place(index)} is held out and has the label "
                f"{label!r}, which no line of the train split has; add such lines, or set "
                "data.validation_fraction=0"
            )
    return tuple(sorted(known))  # pyright: ignore[reportArgumentType]


def _is_label(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
