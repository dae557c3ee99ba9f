"""Text sets of TFDS, the project's own `python_stdlib` among them, as documents.

Importing tensorflow_datasets takes most of a second, so every function here imports it itself.
"""

import contextlib
import difflib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock

logger = logging.getLogger(__name__)


class TfdsDocuments(Sequence[str]):
    """The text feature of some examples of a split, read and decoded on access.

    Args:
        source: The examples of the split.
        text_feature: The feature that holds the text.
        positions: Which examples; all of them by default.
    """

    def __init__(self, source: Sequence[Any], text_feature: str, positions: range | None = None):
        self._source, self._text_feature = source, text_feature
        self._positions = range(len(source)) if positions is None else positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        text = self._source[self._positions[index]][self._text_feature]
        # A bad byte in a published set is not the user's to repair.
        return text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text


def open_builder(name: str, text_field: str, cache_path: Path) -> Any:
    """Returns the prepared TFDS builder of this name; downloads and builds it on first use.

    Sets are kept in $TFDS_DATA_DIR, or in the cache directory where that is not set. Processes
    that start together build a set once.

    Raises:
        ValueError: TFDS has no such set, or none with this text feature, or could not prepare it.
    """
    if name == "python_stdlib":
        data_dir = cache_path / "tensorflow_datasets"
    else:
        data_dir = Path(os.environ.get("TFDS_DATA_DIR") or cache_path / "tensorflow_datasets")
    data_dir = data_dir.expanduser()
    builder = _make_builder(name, data_dir)
    _text_feature(builder, text_field)  # Checked before much is downloaded.
    if _is_prepared(builder):
        return builder
    # The lock is not in data_dir, which may be shared and not the user's to write.
    lock_name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    with filelock.FileLock(cache_path / f"tfds-{lock_name}.lock"):
        builder = _make_builder(name, data_dir)
        if not _is_prepared(builder):
            _prepare(builder, name)
    return builder


def builder_key(builder: Any) -> str:
    """Returns an identity of the prepared set: its name, config, version and sizes."""
    sizes = [f"{s.name}:{s.num_examples}:{s.num_bytes}" for s in builder.info.splits.values()]
    return f"{builder.info.full_name} {' '.join(sorted(sizes))}"


def open_builder_documents(
    builder: Any, text_field: str, validation_fraction: float
) -> dict[str, Sequence[str]]:
    """Returns the set's train and validation documents.

    A set without a validation split gives up the last part of its train split, which is a random
    sample, since TFDS shuffles a set by hash when it builds it.

    Raises:
        ValueError: The set has no train split, no such text feature or no random access.
    """
    name = builder.info.full_name
    feature = _text_feature(builder, text_field)
    splits = builder.info.splits
    if "train" not in splits:
        raise ValueError(
            f"data.name: the TFDS set {name!r} has the splits {sorted(splits)}, but no 'train'; "
            "choose a set that has one"
        )
    train = _open_split(builder, "train")
    if "validation" in splits:
        validation = _open_split(builder, "validation")
        return {
            "train": TfdsDocuments(train, feature),
            "validation": TfdsDocuments(validation, feature),
        }
    # At least one is held out where any is asked for.
    num_held = max(round(len(train) * validation_fraction), 1) if validation_fraction else 0
    positions = range(len(train))
    num_train = max(len(train) - num_held, 0)
    return {
        "train": TfdsDocuments(train, feature, positions[:num_train]),
        "validation": TfdsDocuments(train, feature, positions[num_train:]),
    }


def _open_split(builder: Any, split: str) -> Sequence[Any]:
    try:
        return builder.as_data_source(split)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"data.name: the {split} split of the TFDS set {builder.info.full_name!r} at "
            f"{builder.data_path} cannot be read by position; delete the set there, so that it is "
            "built again as array_record, or set data.cache_dir to build it elsewhere"
        ) from error


def _make_builder(name: str, data_dir: Path) -> Any:
    import tensorflow_datasets as tfds

    if name == "python_stdlib":
        from data.python_stdlib import PythonStdlib

        return PythonStdlib(data_dir=data_dir, file_format="array_record")
    # TFDS registers its older sets group by group, and stops silently at a group whose optional
    # libraries are missing; naming the text group makes sure of it.
    import tensorflow_datasets.text  # noqa: F401  # pyright: ignore[reportUnusedImport]

    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise ValueError(
            f"data.name={name!r} is not a TFDS set; {_nearest(name.partition('/')[0], known)}, "
            "or use 'python_stdlib', 'text', or 'package.module:function' of your own"
        ) from error
    except Exception as error:  # TFDS raises many kinds, for configs, versions and libraries.
        set_name, _, config = name.partition("/")
        configs = list(tfds.builder_cls(set_name.partition(":")[0]).builder_configs)
        if config and config.partition(":")[0] not in configs:
            raise ValueError(
                f"data.name={name!r}: the TFDS set {set_name!r} has no config {config!r}; "
                f"{_nearest(config, configs)}"
            ) from error
        raise ValueError(f"data.name={name!r} cannot be opened: {_first_line(error)}") from error


def _is_prepared(builder: Any) -> bool:
    # TFDS renames a set into place when it is complete. Its own is_prepared() says the same, with
    # a warning where the set is not there yet.
    return (builder.data_path / "dataset_info.json").exists()


def _prepare(builder: Any, name: str) -> None:
    logger.info("Building the data set %s in %s", builder.info.full_name, builder.data_path)
    try:
        # The project's own set takes a second and needs no download: TFDS's report of it would
        # only be noise.
        with _quiet() if name == "python_stdlib" else contextlib.nullcontext():
            builder.download_and_prepare()
    except Exception as error:  # Network, disk, missing libraries, checksums: TFDS has no base.
        raise ValueError(
            f"data.name={name!r} could not be downloaded or built in {builder.data_path}: "
            f"{_first_line(error)}; mend that, or copy a prepared set there"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()


def _text_feature(builder: Any, text_field: str) -> str:
    import tensorflow_datasets as tfds

    features = builder.info.features
    texts = [key for key, value in features.items() if isinstance(value, tfds.features.Text)]
    if text_field in texts:
        return text_field
    # The default field name stands for "the text", whatever the set calls it.
    if text_field == "text" and len(texts) == 1:
        return texts[0]
    remedy = f"set data.text_field to one of {sorted(texts)}" if texts else "choose a set of texts"
    raise ValueError(
        f"data.text_field={text_field!r} is not a text feature of the TFDS set "
        f"{builder.info.full_name!r}, whose features are {sorted(features)}; {remedy}"
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"the nearest known names are {near}"
    return f"there are {sorted(known)[:10]}" + (", and more" if len(known) > 10 else "")


def _first_line(error: Exception) -> str:
    # TFDS puts the arguments of its own call, in braces, before what was wrong.
    message = str(error).rpartition('}": ')[2].strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no reason given'}"
