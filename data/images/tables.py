"""Images in Parquet and Arrow files.

The columns are those that Hugging Face's `datasets` writes: an image is a struct with `bytes`, or
plain bytes; a label is a name, or a number whose name is in the schema; a caption is a text.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.checks import first_names
from data.images.sources import Fields, Sample
from data.table_files import Budget, open_table
from untrusted.documents import parse_json
from untrusted.messages import shortened


def samples_of_table(file: Path, fields: Fields, budget: Budget) -> Iterator[Sample]:
    """Yield each image of a table, with its label or caption; in a process with limits.

    Args:
        budget: limits the number of values in a batch.

    Raises:
        ValueError: The file is damaged, or its columns are not suitable.
        OSError: The file cannot be read.
    """
    number = 0
    with open_table(file, budget) as (schema, batches):
        columns = _Columns.of(schema, fields, file)
        for batch in batches(columns.names):
            for row in batch.to_pylist():
                yield columns.sample_of(row, f"row {number} of {file}")
                number += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Columns:
    """The columns of a table that are used.

    Attributes:
        fields: columns of labels or captions.
        label_names: number of a label -> its name; None if labels are their own names.
    """

    image: str
    fields: Fields
    label_names: Mapping[int, str] | None

    @classmethod
    def of(cls, schema: Any, fields: Fields, file: Path) -> "_Columns":
        """Find the columns in a pyarrow.Schema."""
        from pyarrow import types

        images = [field.name for field in schema if _is_image(field.type)]
        if "image" not in images and len(images) != 1:
            raise ValueError(
                f"data.paths: {file} has the columns {first_names(schema.names)}, of which "
                f"{first_names(images) or 'none'} can be images; it needs one, or one named 'image'"
            )
        label_names = None
        for key, column, what in (
            ("data.label_field", fields.label, "labels"),
            ("data.text_field", fields.caption, "captions"),
        ):
            if column is not None and column not in schema.names:
                raise ValueError(
                    f"{key}={column!r} is not among the columns {first_names(schema.names)} of "
                    f"{file}; set it to the column of {what}"
                )
        if (label := fields.label) is not None:
            kind = schema.field(label).type
            if types.is_integer(kind):
                label_names = dict(enumerate(_names_of_labels(schema, label, file)))
            elif not (types.is_string(kind) or types.is_large_string(kind)):
                raise ValueError(
                    f"data.label_field={label!r} has the type {kind} in {file}; labels must be "
                    "whole numbers or strings"
                )
        image = "image" if "image" in images else images[0]
        return cls(image=image, fields=fields, label_names=label_names)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [self.image, *(name for name in self.fields if name is not None)]

    def sample_of(self, row: Mapping[str, Any], place: str) -> Sample:
        """Return the sample of a row."""
        value = row[self.image]
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise ValueError(
                f"data.paths: {place} has no bytes in {self.image!r}; embed the images, for "
                "example with Dataset.to_parquet(…) after cast_column('image', datasets.Image())"
            )
        label = None if self.fields.label is None else row[self.fields.label]
        if self.label_names and isinstance(label, int):
            if label not in self.label_names:
                raise ValueError(
                    f"data.paths: {place} has the label {label}, for which the schema has no name; "
                    "correct it"
                )
            label = self.label_names[label]
        caption = None if self.fields.caption is None else row[self.fields.caption]
        if not isinstance(caption, str | None):
            raise ValueError(
                f"data.text_field={self.fields.caption!r}: {place} has "
                f"{shortened(repr(caption))} there, which must be a text; set it to the column of "
                "captions"
            )
        return Sample(image=content, label=label, caption=caption or "", place=place)


def _is_image(kind: Any) -> bool:
    """Return whether a column of this type of pyarrow can have encoded images."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(each.name == "bytes" and _is_image(each.type) for each in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _names_of_labels(schema: Any, label: str, file: Path) -> list[str]:
    """Return the names of the labels that `datasets` has put into a schema; [] if it has none."""
    content = (schema.metadata or {}).get(b"huggingface")
    if content is None:
        return []
    value: Any = parse_json(content.decode("utf-8", "replace"), f"the schema of {file}")
    for key in ("info", "features", label, "names"):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"data.paths: the labels of {file} are {shortened(json.dumps(value))}, but must be a "
            "list of names"
        )
    if len({name.replace("/", "_") for name in value}) < len(value):
        raise ValueError(f"data.paths: {file} has two labels of the same name; rename one of them")
    return value
