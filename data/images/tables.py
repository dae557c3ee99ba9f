"""Images in Parquet and Arrow files, unpacked into folders in the cache when they are first used.

    train-*.parquet: image, label ──> cache/image_tables/train-00000-1f…/cat/000000017.jpg, …

Afterwards everything is as for folders of images. The columns are those that Hugging Face's
`datasets` writes: an image is a struct with `bytes`, or plain bytes; a label is a name, or a number
whose name is in the schema.
"""

import dataclasses
import glob
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from data.cache import locked
from data.checks import files_key, first_names, matches_of
from data.config import DataConfig
from data.saved_sets import files_of_folder
from data.table_files import SUFFIXES, Budget, convert, num_rows_or_error, open_table
from untrusted.documents import parse_json
from untrusted.files import make_private_directory, new_directory
from untrusted.messages import shortened

#: The folder of images without labels.
_UNLABELED = "images"
#: Format in Pillow -> suffix of a file; other images get the suffix of the most common format.
_SUFFIX_OF_FORMAT = {"PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tiff", "PPM": ".ppm"}

_log = logging.getLogger(__name__)


def unpack_tables(config: DataConfig) -> tuple[str, ...]:
    """Return `data.paths`, with folders in the cache in place of tables.

    Raises:
        ValueError: A table cannot be read, or has no images or labels.
    """
    return tuple(_unpack(path, config) for path in config.paths)


def _unpack(path: str, config: DataConfig) -> str:
    files = _files_of(path)
    if not files:
        return path
    label = config.label_field if config.objective == "image_classification" else None
    directory = config.cache_path / "image_tables"
    make_private_directory(directory)
    # The label is hashed too, because a column may have any name.
    key = hashlib.sha256(f"{files_key(files, config.verify)} {label}".encode()).hexdigest()[:16]
    target = directory / f"{files[0].stem}-{key}"
    with locked(target):
        if not target.exists():
            for leftover in directory.glob(f".{glob.escape(target.name)}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)  # left by a killed process
            with new_directory(target) as folder:
                argument = {
                    "tables": [str(file) for file in files],
                    "label": label,
                    "folder": str(folder),
                }
                count = convert(_write_images, argument, files)
            _log.info("%s: %s images, unpacked into %s", path, f"{count:,}", target)
    return str(target)


def _files_of(path: str) -> list[Path]:
    """Return the tables that an entry of `data.paths` stands for; [] if it stands for none."""
    matches = sorted(map(Path, matches_of(path)))
    if len(matches) == 1 and matches[0].is_dir():
        return files_of_folder(matches[0])
    return [file for file in matches if file.suffix in SUFFIXES and file.is_file()]


def _write_images(argument: dict[str, Any]) -> dict[str, Any]:
    """Write the images of tables, with a folder for each label; in a process with limits."""
    files = [Path(name) for name in argument["tables"]]

    def write(budget: Budget) -> None:
        for file in files:
            for content, name in _rows(file, argument["label"], budget):
                folder = Path(argument["folder"], name)
                folder.mkdir(exist_ok=True)
                # Numbers keep the order, and name the row in messages about broken images.
                image = folder / f"{budget.num_rows:09d}{_suffix_of(content)}"
                budget.spend(len(content))
                image.write_bytes(content)

    return num_rows_or_error(write, files)


def _suffix_of(content: bytes) -> str:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _SUFFIX_OF_FORMAT.get(image.format or "", ".jpg")
    except Exception:  # For a broken file, Pillow raises many types; the file is checked later.
        return ".jpg"


def _rows(file: Path, label: str | None, budget: Budget) -> Iterator[tuple[bytes, str]]:
    """Yield each image of a table, with the name of its folder."""
    number = 0
    with open_table(file, budget) as (schema, batches):
        columns = _Columns.of(schema, label, file)
        for batch in batches(columns.names):
            for row in batch.to_pylist():
                yield columns.image_of(row, number), columns.folder_of(row, number)
                number += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Columns:
    """The columns of a table that are used.

    Attributes:
        label: column of labels; None if the objective needs none.
        folders: label -> name of its folder; None if labels are their own names.
    """

    file: Path
    image: str
    label: str | None
    folders: Mapping[int, str] | None

    @classmethod
    def of(cls, schema: Any, label: str | None, file: Path) -> "_Columns":
        """Find the columns in a pyarrow.Schema."""
        from pyarrow import types

        images = [field.name for field in schema if _is_image(field.type)]
        if "image" not in images and len(images) != 1:
            raise ValueError(
                f"data.paths: {file} has the columns {first_names(schema.names)}, of which "
                f"{first_names(images) or 'none'} can be images; it needs one, or one named 'image'"
            )
        folders = None
        if label is not None:
            if label not in schema.names:
                raise ValueError(
                    f"data.label_field={label!r} is not among the columns "
                    f"{first_names(schema.names)} of {file}; set it to the column of labels"
                )
            kind = schema.field(label).type
            if types.is_integer(kind):
                folders = dict(enumerate(_names_of_labels(schema, label, file)))
            elif not (types.is_string(kind) or types.is_large_string(kind)):
                raise ValueError(
                    f"data.label_field={label!r} has the type {kind} in {file}; labels must be "
                    "whole numbers or strings"
                )
        image = "image" if "image" in images else images[0]
        return cls(file=file, image=image, label=label, folders=folders)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [self.image, *([] if self.label is None else [self.label])]

    def image_of(self, row: Mapping[str, Any], number: int) -> bytes:
        """Return the encoded image of a row."""
        value = row[self.image]
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise ValueError(
                f"data.paths: row {number} of {self.file} has no bytes in {self.image!r}; embed "
                "the images, for example with Dataset.to_parquet(…) after "
                "cast_column('image', datasets.Image())"
            )
        return content

    def folder_of(self, row: Mapping[str, Any], number: int) -> str:
        """Return the name of the folder of a row."""
        if self.label is None:
            return _UNLABELED
        value = row[self.label]
        if isinstance(value, int) and self.folders:
            name = self.folders.get(value)
        elif isinstance(value, int) and value >= 0:
            name = f"{value:05d}"  # in numerical order
        else:
            name = value if isinstance(value, str) else None
        name = None if name is None else name.replace("/", "_")
        if not name or name.startswith(".") or "\0" in name or len(name.encode()) > 200:
            raise ValueError(
                f"data.paths: row {number} of {self.file} has the label "
                f"{shortened(repr(value))}, which cannot name a class; leave out such rows, or "
                "rename the class"
            )
        return name


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
