"""Examples stored as lines of .jsonl files, for objectives that read labeled examples."""

import hashlib
from collections.abc import Sequence
from typing import Any

from data.checks import is_int
from data.config import DataConfig
from data.examples import Label
from data.formats import format_of
from data.sequences import LazySequence
from data.text.spans import DocumentSpans
from data.text.tables import as_lines
from data.text.text_files import find_files, record_of_json, split_files
from data.validation import naming_validation_paths, validation_sources


class Records(Sequence[dict[str, Any]]):
    """A sequence of .jsonl lines, each parsed and checked when it is read.

    Attributes:
        text_fields: config key -> field name, for each text that the objective reads from a line.
    """

    def __init__(self, spans: DocumentSpans, config: DataConfig):
        self.spans = spans
        self._config = config
        self.text_fields = {"text_field": config.text_field}
        if config.objective == "seq2seq":
            self.text_fields["target_field"] = config.target_field
        elif config.pair_field:
            self.text_fields["pair_field"] = config.pair_field

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        config = self._config
        place = self.spans.place_of(index)
        record = record_of_json(self.spans.read(index), place, config.text_field)
        for key, field in self.text_fields.items():
            value = record.get(field)
            if not isinstance(value, str) or not value.strip():
                what = "is empty" if isinstance(value, str) else "is missing or not a string"
                raise ValueError(
                    f"data.paths: {place}: the field {field!r} (data.{key}) {what}; fix the line, "
                    f"or set data.{key} to the field that contains the text"
                )
        label = record.get(config.label_field)
        if config.objective == "classification" and not (isinstance(label, str) or is_int(label)):
            raise ValueError(
                f"data.paths: {place} has the fields {sorted(record)}, but no string or whole "
                f"number in data.label_field={config.label_field!r}; set data.label_field to the "
                "field that contains the label"
            )
        return record

    def read(self, index: int) -> tuple[list[str], Label | None]:
        """Read and check one line.

        Returns:
            The texts of the line, in the order of `text_fields`, and its label, or None if the
            objective has no labels.
        """
        record = self[index]
        texts = [record[field] for field in self.text_fields.values()]
        is_labelled = self._config.objective == "classification"
        return texts, record[self._config.label_field] if is_labelled else None


def texts_of_records(records: Records) -> Sequence[str]:
    """Return the texts of each line joined into one document, to train a tokenizer on."""
    return LazySequence(len(records), lambda index: "\n".join(records.read(index)[0]))


def split_lines(config: DataConfig) -> dict[str, DocumentSpans]:
    """Split the lines of `data.paths` into train and validation, without parsing them.

    They are the lines of .jsonl files, and of other files, which are converted to such files.

    Raises:
        FileNotFoundError: A glob matches nothing.
        ValueError: A file is of another kind, a table cannot be read, or there are too few lines
            for the splits.
    """
    files = find_files(config.paths)
    others = [str(file) for file in files if (format_of(file) or "").startswith(".txt")]
    if others:
        raise ValueError(
            f"data.paths matches {others[0]!r}, but data.objective={config.objective!r} reads only "
            ".jsonl, .json, .csv, .tsv, .parquet and .arrow files; narrow the glob or convert the "
            "file"
        )
    lines = as_lines(files, config.cache_path, config.verify)
    return split_files(lines, config.held_out_fraction, config.sequence_length, files)


def validation_lines(config: DataConfig) -> dict[str, DocumentSpans]:
    """Return the lines of each set of `data.validation_paths`, by its name, without parsing them.

    Raises:
        FileNotFoundError: A glob matches nothing.
        ValueError: A file is of another kind, a table cannot be read, or a set has no lines.
    """
    with naming_validation_paths():
        sources = validation_sources(config)
        return {name: split_lines(source)["train"] for name, source in sources.items()}


def scan(splits: dict[str, Records]) -> tuple[str, dict[str, list[Label | None]]]:
    """Read and check every line; return a hash of all lines, and each line's label by split.

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
    """Check the labels of a classification objective, and return those of the train split, sorted.

    Args:
        labels: split -> the label of each line.

    Raises:
        ValueError: The train split has fewer than two labels or labels of two types, or the
            validation split has a label that the train split lacks.
    """
    known = set(labels["train"])
    if len({type(label) for label in known}) != 1 or len(known) < 2:
        some = sorted(map(repr, known))[:4]
        raise ValueError(
            f"data.label_field={config.label_field!r} must have at least two labels in the train "
            f"split, all strings or all whole numbers, but has {', '.join(some)}; fix the files, "
            "or choose another field"
        )
    known_labels = tuple(sorted(known))  # pyright: ignore[reportArgumentType]
    remedy = "add lines with this label, or set data.validation_fraction=0"
    check_known_labels(labels["validation"], splits["validation"], known_labels, remedy=remedy)
    return known_labels


def check_known_labels(
    labels: Sequence[Label | None],
    records: Records,
    known: tuple[Label, ...],
    *,
    remedy: str = "remove the line, or train on lines with this label",
) -> None:
    """Check the labels of validation lines.

    Args:
        labels: label of each line; None if the objective has no labels.
        known: labels of the train split.

    Raises:
        ValueError: A label is not known.
    """
    for index, label in enumerate(labels):
        if label is not None and label not in known:
            raise ValueError(
                f"data.paths: {records.spans.place_of(index)} is held out and has the label "
                f"{label!r}, which no line of the train split has; {remedy}"
            )
