"""Images that are stored in other files, unpacked into folders in the cache on first use.

    train-*.parquet: image, label       ──> cache/image_tables/train-00000-1f…/cat/000000017.jpg, …
    train-*.tar: 17.jpg, 17.cls, …      ──> the same
    with captions: image, text          ──> …/000000017.jpg and a line of …/metadata.jsonl

Afterwards everything is as for folders of images.
"""

import contextlib
import glob
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from data.checks import files_key, matches_of
from data.config import DataConfig
from data.images.sources import Fields, Sample
from data.images.tables import samples_of_table
from data.images.tars import TAR, samples_of_tar
from data.saved_sets import files_of_folder
from data.table_files import SUFFIXES, Budget, convert, num_rows_or_error
from untrusted.cached import locked
from untrusted.files import make_private_directory, new_directory
from untrusted.messages import shortened

#: The file of a folder that has the captions of its images, and the key of an image's file name.
CAPTIONS = "metadata.jsonl"
IMAGE_FIELD = "file_name"
#: The folder of images without labels.
_UNLABELED = "images"
#: Format in Pillow -> suffix of a file; other images get the suffix of the most common format.
_SUFFIX_OF_FORMAT = {"PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tiff", "PPM": ".ppm"}

_log = logging.getLogger(__name__)


def unpack(config: DataConfig) -> tuple[str, ...]:
    """Return `data.paths`, with folders in the cache in place of tables and tars.

    Raises:
        ValueError: A file cannot be read, or has no images, labels or captions.
    """
    return tuple(_unpack(path, config) for path in config.paths)


def _unpack(path: str, config: DataConfig) -> str:
    files = _files_of(path)
    if not files:
        return path
    fields = Fields(
        label=config.label_field if config.objective == "image_classification" else None,
        caption=config.text_field if config.objective == "image_text" else None,
    )
    directory = config.cache_path / "image_tables"
    make_private_directory(directory)
    # The fields are hashed too, because a column may have any name.
    hashed = f"{files_key(files, config.verify)} {fields.label}"
    hashed += "" if fields.caption is None else f" {fields}"
    target = directory / f"{files[0].stem}-{hashlib.sha256(hashed.encode()).hexdigest()[:16]}"
    with locked(target):
        if not target.exists():
            for leftover in directory.glob(f".{glob.escape(target.name)}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)  # left by a killed process
            with new_directory(target) as folder:
                argument = {
                    "files": [str(file) for file in files],
                    "fields": fields._asdict(),
                    "folder": str(folder),
                }
                count = convert(_write_images, argument, files)
            _log.info("%s: %s images, unpacked into %s", path, f"{count:,}", target)
    return str(target)


def _files_of(path: str) -> list[Path]:
    """Return the tables or tars that an entry of `data.paths` stands for; [] if for none."""
    matches = sorted(map(Path, matches_of(path)))
    if len(matches) == 1 and matches[0].is_dir():
        return files_of_folder(matches[0])
    return [file for file in matches if file.suffix in (*SUFFIXES, TAR) and file.is_file()]


def _write_images(argument: dict[str, Any]) -> dict[str, Any]:
    """Write the images of files, with a folder for each label; in a process with limits."""
    files = [Path(name) for name in argument["files"]]
    fields = Fields(**argument["fields"])
    root = Path(argument["folder"])

    def write(budget: Budget) -> None:
        with contextlib.ExitStack() as stack:
            captions = None
            if fields.caption is not None:
                captions = stack.enter_context(open(root / CAPTIONS, "w", encoding="utf-8"))
            write_samples(budget, captions)

    def write_samples(budget: Budget, captions: TextIO | None) -> None:
        for file in files:
            for sample in _samples(file, fields, budget):
                # Numbers keep the order, and name the row in messages about broken images.
                name = f"{budget.num_rows:09d}{_suffix_of(sample.image)}"
                budget.spend(len(sample.image))
                folder = root
                if captions is None:
                    folder = root / _folder_of(sample, fields)
                    folder.mkdir(exist_ok=True)
                else:
                    record = {IMAGE_FIELD: name, fields.caption: sample.caption}
                    captions.write(json.dumps(record) + "\n")
                (folder / name).write_bytes(sample.image)

    return num_rows_or_error(write, files)


def _samples(file: Path, fields: Fields, budget: Budget) -> Iterator[Sample]:
    if file.suffix == TAR:
        return samples_of_tar(file, fields)
    return samples_of_table(file, fields, budget)


def _suffix_of(content: bytes) -> str:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _SUFFIX_OF_FORMAT.get(image.format or "", ".jpg")
    except Exception:  # For a broken file, Pillow raises many types; the file is checked later.
        return ".jpg"


def _folder_of(sample: Sample, fields: Fields) -> str:
    """Return the name of the folder of a sample, which its label gives."""
    if fields.label is None:
        return _UNLABELED
    label = sample.label
    if isinstance(label, int) and label >= 0:
        label = f"{label:05d}"  # in numerical order
    name = label.replace("/", "_") if isinstance(label, str) else None
    if not name or name.startswith(".") or "\0" in name or len(name.encode()) > 200:
        raise ValueError(
            f"data.paths: {sample.place} has the label {shortened(repr(sample.label))}, which "
            "cannot name a class; leave out such rows, or rename the class"
        )
    return name
