"""The validation sets that a config names, each with a config of its own to load it with.

    data.paths=train.jsonl                         source of the training data
    data.validation_paths=wiki=w.txt,code=c.txt    {"wiki": config with paths=w.txt, "code": …}

Nothing is held out of the training data then. A saved `DatasetDict`, or a dataset of the Hugging
Face hub, is replaced by its splits first. The splits of a TFDS set have no paths:

    data.name=imdb_reviews  data.validation_splits=test,unsupervised
                                                   {"test": config with split=test, …}
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from data.config import NOT_TFDS, DataConfig
from data.formats import format_of
from data.hub_files import hub_splits
from data.named_paths import named_paths, split_name
from data.saved_sets import saved_splits
from untrusted.imports import is_import_path

_DEFAULT_SPLIT = "validation"


def with_split_folders(config: DataConfig) -> DataConfig:
    """Replace entries of `data.paths` that have splits by their splits.

    The folder of a saved `DatasetDict` has splits, and so may a folder of a dataset on the Hugging
    Face hub. Without `data.validation_splits` and `data.validation_paths`, the split `validation`
    is used for evaluations, if there is one.

    Raises:
        ValueError: A split does not exist, or splits are named but nothing has splits.
    """
    config = with_validation_folders(config)
    # Not a dict: an entry may occur twice, for example to read token files twice.
    splits = [(path, _splits_of(path, config)) for path in config.paths]
    if not any(entries for _, entries in splits):
        _check_no_splits_named(config)
        return config
    has_splits = any(entries.keys() - {""} for _, entries in splits)
    if not has_splits:
        _check_no_splits_named(config)
    paths = tuple(
        entry
        for path, entries in splits
        for entry in _entries(path, config.split, entries, "split")
    )
    validation = config.validation_paths
    if has_splits and not validation:
        validation = _validation_entries(config, dict(splits))
    return dataclasses.replace(
        config, paths=paths, validation_paths=validation, split="train", validation_splits=()
    )


def with_validation_folders(config: DataConfig) -> DataConfig:
    """Replace folders of the Hugging Face hub in `data.validation_paths` by their files.

    Of a folder with splits, the set is the split `validation`, or the only one.

    Raises:
        ValueError: A folder has several splits, but none is called `validation`.
    """
    validation: list[str] = []
    for entry in config.validation_paths:
        name, path = split_name(entry)
        with naming_validation_paths():
            splits = hub_splits(path, reads_images=config.reads_images)
        if len(splits) > 1 and _DEFAULT_SPLIT not in splits:
            raise ValueError(
                f"data.validation_paths: {path} has the splits {', '.join(sorted(splits))}; name "
                f"the files of one, such as {next(iter(splits.values()))[0]}"
            )
        only = next(iter(splits.values()), (path,))
        paths = splits.get(_DEFAULT_SPLIT, only)
        validation += [f"{name}={each}" if name else each for each in paths]
    return dataclasses.replace(config, validation_paths=tuple(validation))


def _splits_of(path: str, config: DataConfig) -> dict[str, tuple[str, ...]]:
    """Return split -> entries of `data.paths`; "" is the split of files without a split."""
    folder = Path(path).expanduser().absolute()  # so that it cannot be read as NAME=PATH
    saved = {name: (str(folder / name),) for name in saved_splits(folder)}
    return saved or hub_splits(path, reads_images=config.reads_images)


def is_tfds(config: DataConfig) -> bool:
    """Return whether the data is a TFDS set, which has splits with names."""
    return config.name not in NOT_TFDS and not is_import_path(config.name)


def _check_no_splits_named(config: DataConfig) -> None:
    if is_tfds(config):  # its splits are known when it is prepared
        return
    for key in ("split", "validation_splits"):
        value = getattr(config, key)
        if value != getattr(DataConfig, key):
            raise ValueError(
                f"data.{key}={value!r} names splits of a DatasetDict or a TFDS set, but no entry "
                f"of data.paths={config.paths!r} is the folder of one that datasets has saved, or "
                f"a folder with splits on the hub; leave data.{key} out, or set data.paths to such "
                "a folder"
            )


def _validation_entries(
    config: DataConfig, splits: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> tuple[str, ...]:
    """Return the entries of the validation splits, as `data.validation_paths` names them."""
    divided = {path: entries for path, entries in splits.items() if entries.keys() - {""}}
    wanted = config.validation_splits
    if not wanted and all(_DEFAULT_SPLIT in entries for entries in divided.values()):
        wanted = (_DEFAULT_SPLIT,)
    return tuple(
        f"{name}={entry}" if len(wanted) > 1 else entry
        for name in wanted
        for path, entries in divided.items()
        for entry in _entries(path, name, entries, "validation_splits")
    )


def _entries(
    path: str, split: str, entries: Mapping[str, tuple[str, ...]], key: str
) -> tuple[str, ...]:
    """Return the entries of a split of a path; the path itself, if it has no splits."""
    if not entries or "" in entries:
        return entries.get("", (path,))
    if split not in entries:
        raise ValueError(
            f"data.{key}: {path} has no split {split!r}; choose from {', '.join(sorted(entries))}"
        )
    return entries[split]


def validation_sources(config: DataConfig) -> dict[str, DataConfig]:
    """Return the config of each set of `data.validation_paths`, by its name.

    Its `paths` are the set; all of its documents are in the train split. For the splits of a TFDS
    set, its `split` is the set.

    Raises:
        ValueError: A set contradicts the other fields of the config.
    """
    if config.validation_splits:
        names = config.validation_names
        sources = [dataclasses.replace(config, split=split) for split in config.validation_splits]
        return dict(zip(names, sources, strict=True))
    return {
        name: dataclasses.replace(
            config, name=_kind(config, paths), paths=paths, mixture=(), streaming=False
        )
        for name, paths in named_paths(config.validation_paths).items()
    }


def _kind(config: DataConfig, paths: tuple[str, ...]) -> str:
    if config.reads_images:
        return "image_folder"
    if any(path.endswith((".bin", ".idx")) for path in paths):
        return "megatron"
    is_text = any(format_of(path) for path in paths)
    # In a mixture, only token files end with .bin.
    reads_tokens = config.name == "megatron" or all(
        entry.endswith(".bin") for entry in config.mixture or ("",)
    )
    return "megatron" if reads_tokens and not is_text else "text"


@contextlib.contextmanager
def naming_validation_paths() -> Iterator[None]:
    """Let errors about files of the block name `data.validation_paths` instead of `data.paths`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if "data.paths" not in str(error):
            raise
        raise type(error)(str(error).replace("data.paths", "data.validation_paths")) from error
