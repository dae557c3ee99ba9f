"""The validation sets that a config names, each with a config of its own to load it with.

    data.paths=train.jsonl                         source of the training data
    data.validation_paths=wiki=w.txt,code=c.txt    {"wiki": config with paths=w.txt, "code": …}

Nothing is held out of the training data then. A saved `DatasetDict` is replaced by the folders of
its splits first.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from data.config import DataConfig
from data.formats import format_of
from data.named_paths import named_paths
from data.saved_sets import saved_splits

_DEFAULT_SPLIT = "validation"


def with_split_folders(config: DataConfig) -> DataConfig:
    """Replace the folder of a `DatasetDict` in `data.paths` by the folders of its splits.

    Without `data.validation_splits` and `data.validation_paths`, the split `validation` is used for
    evaluations, if there is one.

    Raises:
        ValueError: A split does not exist, or splits are named but no `DatasetDict` is.
    """
    splits = {path: saved_splits(Path(path).expanduser()) for path in config.paths}
    if not any(splits.values()):
        for key in ("split", "validation_splits"):
            value = getattr(config, key)
            if value != getattr(DataConfig, key):
                raise ValueError(
                    f"data.{key}={value!r} names splits of a DatasetDict, but no entry of "
                    f"data.paths={config.paths!r} is the folder of one that datasets has saved; "
                    f"leave data.{key} out, or set data.paths to such a folder"
                )
        return config
    paths = tuple(
        _folder(path, config.split, names, "split") if names else path
        for path, names in splits.items()
    )
    validation = config.validation_paths
    if not validation:
        validation = _validation_folders(config, splits)
    return dataclasses.replace(
        config, paths=paths, validation_paths=validation, split="train", validation_splits=()
    )


def _validation_folders(config: DataConfig, splits: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the folders of the validation splits, as `data.validation_paths` names them."""
    saved = {path: names for path, names in splits.items() if names}
    wanted = config.validation_splits
    if not wanted and all(_DEFAULT_SPLIT in names for names in saved.values()):
        wanted = (_DEFAULT_SPLIT,)
    return tuple(
        f"{name}={folder}" if len(wanted) > 1 else folder
        for name in wanted
        for path, names in saved.items()
        for folder in [_folder(path, name, names, "validation_splits")]
    )


def _folder(path: str, split: str, names: tuple[str, ...], key: str) -> str:
    if split not in names:
        raise ValueError(
            f"data.{key}: {path} has no split {split!r}; choose from {', '.join(names)}"
        )
    # An absolute path begins with a slash, so it cannot be read as NAME=PATH.
    return str(Path(path).expanduser().absolute() / split)


def validation_sources(config: DataConfig) -> dict[str, DataConfig]:
    """Return the config of each set of `data.validation_paths`, by its name.

    Its `paths` are the set; all of its documents are in the train split.

    Raises:
        ValueError: A set contradicts the other fields of the config.
    """
    return {
        name: dataclasses.replace(config, name=_kind(config, paths), paths=paths, mixture=())
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
