"""Files of datasets on the Hugging Face hub, in place of paths.

    hf://datasets/org/name/data/*.parquet    the files that a glob matches
    hf://datasets/org/name/en                the files of a folder, which may have splits
    hf://datasets/org/name                   the files of the whole dataset

The names of files and folders tell splits, as in `datasets`: `data/train-00000-of-00002.parquet`
and `test/1.csv` belong to `train` and `test`. Which files a folder stands for is decided by the
list of files, and only these are downloaded. The readers of local files do the rest.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from data.config import DataConfig
from data.formats import JSON, TABLES, format_of, named_formats
from data.named_paths import matching_files, named_paths
from data.store_files import local_entry
from untrusted.hub import Repository, cached_files, dataset_of, fetch, list_files, pin
from untrusted.stores import is_url

# Words that stand for a split, if no letters surround them: `train2.csv` belongs to `train`.
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SPLIT = re.compile(rf"(?<![A-Za-z])({'|'.join(_WORDS)})(?![A-Za-z])")
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")

_log = logging.getLogger(__name__)


def hub_splits(entry: str, *, reads_images: bool) -> dict[str, tuple[str, ...]]:
    """Return the splits of a folder of a dataset: name -> entries of `data.paths`.

    Args:
        entry: entry of `data.paths`.

    Returns:
        The splits; "" is the name of all files together if their names tell no splits. Empty if
        the entry is no folder of a dataset, or a folder of images, which is used as it is.

    Raises:
        ValueError: The hub has no such dataset, or the folder has no data, or too many kinds of it.
        ConnectionError: The hub cannot be reached.
    """
    reference = dataset_of(entry)
    if reference is None:
        return {}
    repository = pin(reference[0])
    path = reference[1]
    files = _list_files(repository, path)
    prefix = f"{path}/" if path else ""
    below = [file.removeprefix(prefix) for file in files if file.startswith(prefix)]
    if not below or path in files or (reads_images and any(f.endswith(_IMAGES) for f in below)):
        return {}
    formats = TABLES if reads_images else None
    # A .json file must be named: most describe the dataset.
    texts = [f for f in below if format_of(f) not in (None, JSON)]
    readable = [f for f in below if f.endswith(formats)] if formats else texts
    if not readable:
        what = " and ".join(TABLES) if reads_images else named_formats()
        raise ValueError(
            f"data.paths: {entry} has no files that can be read ({what}), but {below[0]}; name "
            "another folder or dataset"
        )
    splits: dict[str, list[str]] = {}
    for file in readable:
        splits.setdefault(_split_of(file), []).append(file)
    without_split = splits.pop("", []) if len(splits) > 1 else []  # such as a license
    _check_one_kind(entry, [file for files in splits.values() for file in files])
    _log_unread(entry, without_split)
    return {
        split: _as_entries(repository, prefix, chosen, below) for split, chosen in splits.items()
    }


def _log_unread(entry: str, files: Sequence[str]) -> None:
    """Log which files are not read because their names tell no split."""
    if files:
        more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
        _log.info(
            "%s: %s%s not read, because other files have the name of a split",
            entry,
            f"{', '.join(files[:3])}{more}",
            " is" if len(files) == 1 else " are",
        )


def _split_of(file: str) -> str:
    """Return the split that the name of a file, or of its folder, tells; "" if none does."""
    words = _SPLIT.findall(file)
    return _WORDS[words[-1]] if words else ""


def _check_one_kind(entry: str, files: Sequence[str]) -> None:
    """Check that files have one format and are in one folder, apart from folders of splits."""
    folders = sorted({"/".join(p for p in f.split("/")[:-1] if not _split_of(p)) for f in files})
    formats = sorted({str(format_of(file)) for file in files})
    if len(folders) > 1:
        listed = ", ".join(folder or "." for folder in folders[:5])
        example = next(folder for folder in folders if folder)
        raise ValueError(
            f"data.paths: {entry} has data in {len(folders)} folders ({listed}), which may be "
            f"different datasets; name one, such as {entry.rstrip('/')}/{example}"
        )
    if len(formats) > 1:
        raise ValueError(
            f"data.paths: {entry} has files of {len(formats)} formats ({', '.join(formats)}); name "
            f"those to read, such as {entry.rstrip('/')}/{'**/' if folders[0] else ''}*{formats[0]}"
        )


def _as_entries(
    repository: Repository, prefix: str, chosen: Sequence[str], files: Sequence[str]
) -> tuple[str, ...]:
    """Return entries that stand for some files: a single glob, if it matches no other file."""
    start = os.path.commonprefix(chosen)
    end = os.path.commonprefix([file[len(start) :][::-1] for file in chosen])[::-1]
    is_plain = len(chosen) > 1 and not re.search(r"[*?\[]", f"{prefix}{start}{end}")
    if is_plain and matching_files(files, f"{start}*{end}") == [*chosen]:
        return (f"{repository}/{prefix}{start}*{end}",)
    return tuple(f"{repository}/{prefix}{file}" for file in chosen)


def with_local_files(config: DataConfig, *, reads_training_data: bool = True) -> DataConfig:
    """Download the files of datasets and URLs that a config names, and put local paths in place.

    Args:
        reads_training_data: whether to download `data.paths`, too.

    Raises:
        ValueError: The hub or the store has no such file, or does not let this user read it.
        ConnectionError: The hub cannot be reached, and the cache lacks a file; or the store cannot
            be reached.
    """
    paths = config.paths
    if reads_training_data:
        paths = tuple(_local_entry("data.paths", path, config) for path in paths)
    validation = tuple(
        (f"{name}=" if name else "") + _local_entry("data.validation_paths", path, config)
        for name, paths_of_set in named_paths(config.validation_paths).items()
        for path in paths_of_set
    )
    if (paths, validation) == (config.paths, config.validation_paths):
        return config
    return dataclasses.replace(config, paths=paths, validation_paths=validation)


def _local_entry(key: str, entry: str, config: DataConfig) -> str:
    """Return the local path or glob of an entry, whose files are downloaded."""
    if is_url(entry):
        return local_entry(key, entry, config.cache_path / "stores")
    reference = dataset_of(entry)
    if reference is None:
        return entry
    repository = pin(reference[0])
    path = reference[1]
    files = files_of_entry(key, entry, repository, path)
    return str(Path(fetch(repository, files), path))


def files_of_entry(key: str, entry: str, repository: Repository, path: str) -> list[str]:
    """Return the files of a pinned dataset that a path stands for.

    Args:
        key: key of the config, for messages.
        entry: dataset and path, as the user wrote them.

    Raises:
        ValueError: There are none.
        ConnectionError: See `_list_files`.
    """
    files = _list_files(repository, path)
    matches = matching_files(files, path)
    if not matches:
        some = f", such as {files[0]}" if files else ""
        raise ValueError(
            f"{key}: no file of data in {repository} matches {path!r}; correct {entry}, or name "
            f"one of its {len(files):,} files of data{some}"
        )
    return matches


def _list_files(repository: Repository, path: str) -> list[str]:
    """Return the files of a pinned dataset, or only the file `path` if the others are not known.

    Raises:
        ConnectionError: The hub cannot be reached, the cache has no list of all files, and `path`
            is no file in the cache. A glob or a folder could then lack files without a notice.
    """
    try:
        return list_files(repository)
    except ConnectionError:
        if path not in cached_files(repository):
            raise
        return [path]
