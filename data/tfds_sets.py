"""Access to TFDS data sets, including this project's own: find, build once, read by position.

Importing tensorflow_datasets takes most of a second, so the functions that need it import it
themselves.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import io
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig
from data.sequences import LazySequence
from fields.paths import check_local
from untrusted.cached import locked, read_cached, write_cached
from untrusted.files import digest_of, remove
from untrusted.imports import is_module_allowed
from untrusted.messages import shortened

# Data sets that ship with the project: name -> import path of the builder.
_OWN = {
    "python_stdlib": "data.text.python_stdlib:PythonStdlib",
    "digits": "data.images.digits:Digits",
}

logger = logging.getLogger(__name__)


def open_builder(name: str, cache_path: Path, check: Callable[[Any], object]) -> Any:
    """Return the builder of a prepared TFDS data set; download and build it on first use.

    Data sets are stored in $TFDS_DATA_DIR, or in the cache directory if that is not set. The
    project's own data sets are always stored in the cache directory, with digests of their files,
    and are built again if they are damaged. If several processes start together, one of them builds
    the data set.

    Args:
        check: raises a ValueError if the builder is of the wrong kind.

    Raises:
        ValueError: TFDS has no such data set, it is of the wrong kind, or it could not be prepared.
    """
    if name in _OWN:
        data_dir = cache_path / "tensorflow_datasets"
    else:
        data_dir = Path(os.environ.get("TFDS_DATA_DIR") or cache_path / "tensorflow_datasets")
        check_local("the environment variable TFDS_DATA_DIR", data_dir)
    data_dir = data_dir.expanduser()
    own_files = (
        _OwnFiles(data_dir / name, cache_path / f"tfds-{name}.digests") if name in _OWN else None
    )
    if own_files is None or own_files.are_intact():
        builder = _make_builder(name, data_dir)
        if _is_prepared(builder):
            check(builder)
            return builder
    # The lock is not stored in data_dir, which may be shared and read-only for this user.
    lock_name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    with locked(cache_path / f"tfds-{lock_name}"):
        if own_files is not None and not own_files.are_intact():
            own_files.remove()
        builder = _make_builder(name, data_dir)
        check(builder)  # Before anything large is downloaded.
        if not _is_prepared(builder):
            _prepare(builder, name)
        if own_files is not None:
            own_files.write_digests()
    return builder


def builder_key(builder: Any) -> str:
    """Return a string that identifies a prepared data set: name, config, version and sizes."""
    sizes = [f"{s.name}:{s.num_examples}:{s.num_bytes}" for s in builder.info.splits.values()]
    return f"{builder.info.full_name} {' '.join(sorted(sizes))}"


def splits_of(builder: Any, config: DataConfig) -> list[str]:
    """Return the names of the splits of a prepared data set.

    Raises:
        ValueError: A split that `data.split` or `data.validation_splits` names does not exist.
    """
    splits = sorted(builder.info.splits)
    # First the splits to evaluate on: one of them may be `data.split` of the config of its set.
    wanted = {"validation_splits": config.validation_splits, "split": (config.split,)}
    for key, names in wanted.items():
        for name in names:
            if name not in splits:
                raise ValueError(
                    f"data.{key}: the TFDS set {builder.info.full_name!r} has no split {name!r}; "
                    f"choose from {', '.join(splits)}"
                )
    return splits


def open_split(builder: Any, split: str, decoders: Any = None) -> Sequence[Any]:
    """Return the examples of a split of a prepared data set, by position.

    Args:
        decoders: decoders that replace TFDS's own for some features, in TFDS's format.

    Raises:
        ValueError: The file format of the data set has no random access.
    """
    try:
        source = builder.as_data_source(split, decoders=decoders)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"data.name: the {split} split of the TFDS set {builder.info.full_name!r} at "
            f"{builder.data_path} cannot be read by position; delete the set there, so that it is "
            "built again as array_record, or set data.cache_dir to build it elsewhere"
        ) from error

    def read(index: int) -> Any:
        try:
            return source[index]
        except Exception as error:  # TFDS and array_record raise many types for damaged files.
            raise ValueError(
                f"example {index} of the {split} split of the TFDS set at {builder.data_path} "
                f"cannot be read ({shortened(error)}); delete the set there, so that it is built "
                "again"
            ) from error

    return LazySequence(len(source), read)


@dataclasses.dataclass(frozen=True)
class _OwnFiles:
    """The files of one of the project's own data sets, and a cache file with their digests."""

    directory: Path
    digests_file: Path

    def are_intact(self) -> bool:
        """Return whether the files are as they were written, or there are none yet."""
        if not self.directory.exists():
            return True
        digests = self._digests()
        return digests is not None and digests == read_cached(self.digests_file)

    def remove(self) -> None:
        """Remove the files, because they are damaged or have no digests."""
        logger.warning("%s is damaged or was not completed; it is built again", self.directory)
        remove(self.directory)

    def write_digests(self) -> None:
        """Write the digests of the files as they are now."""
        digests = self._digests()
        if digests is not None:
            write_cached(self.digests_file, digests)

    def _digests(self) -> bytes | None:
        """Return the digests as JSON, or None if a file cannot be read."""
        try:
            paths = [path for path in self.directory.rglob("*") if not path.is_dir()]
            names = {str(path.relative_to(self.directory)): digest_of(path) for path in paths}
        except (OSError, ValueError):
            return None
        return json.dumps(names, sort_keys=True).encode()


def _make_builder(name: str, data_dir: Path) -> Any:
    import tensorflow_datasets as tfds

    if name in _OWN:
        return pkgutil.resolve_name(_OWN[name])(data_dir=data_dir, file_format="array_record")
    # TFDS registers its older data sets group by group, and stops silently at the first group whose
    # optional libraries are missing. Importing the groups we need registers them in any case.
    import tensorflow_datasets.image_classification  # noqa: F401
    import tensorflow_datasets.text  # noqa: F401  # pyright: ignore[reportUnusedImport]

    _check_namespace(name)
    _check_feature_imports()
    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise ValueError(
            f"data.name={name!r} is not a TFDS set; {_nearest(name.partition('/')[0], known)}, "
            "or use 'python_stdlib', 'text', 'digits', 'image_folder', or "
            "'package.module:function' of your own"
        ) from error
    except ForeignFeature:
        raise
    except Exception as error:  # TFDS raises many types, for configs, versions and libraries.
        set_name, _, config = name.partition("/")
        configs = _configs_of(set_name.partition(":")[0])
        if config and configs is not None and config.partition(":")[0] not in configs:
            raise ValueError(
                f"data.name={name!r}: the TFDS set {set_name!r} has no config {config!r}; "
                f"{_nearest(config, configs)}"
            ) from error
        raise ValueError(f"data.name={name!r} cannot be opened: {_first_line(error)}") from error


def _configs_of(set_name: str) -> list[str] | None:
    """Return the configs of a TFDS set, or None if TFDS knows the set only from its files."""
    import tensorflow_datasets as tfds

    try:
        return list(tfds.builder_cls(set_name).builder_configs)
    except tfds.core.DatasetNotFoundError:
        return None


class ForeignFeature(ValueError):
    """A prepared data set names a class that is not part of TFDS."""


def _check_namespace(name: str) -> None:
    """Refuse the sets of a namespace, such as 'kaggle:x', for which TFDS may download code."""
    namespace, colon, suffix = name.partition("/")[0].partition(":")
    if colon and not suffix[:1].isdigit():
        raise ValueError(
            f"data.name={name!r} is in the namespace {namespace!r} of TFDS, whose sets may run "
            "code that is downloaded; only the sets of TFDS itself can be used, or "
            "'package.module:function' of your own"
        )


@functools.cache
def _check_feature_imports() -> None:
    """Make TFDS check the classes that a features.json names before it imports them.

    A prepared data set that TFDS does not know itself is opened from its files. TFDS imports every
    `pythonClassName` of its features.json, which may come with the cache directory from somebody
    else.
    """
    import tensorflow_datasets as tfds

    connector: Any = tfds.features.FeatureConnector
    find_class = connector.cls_from_name.__func__

    def find_allowed_class(cls: Any, python_class_name: str) -> Any:
        module = python_class_name.rpartition(".")[0]
        if module.partition(".")[0] != "tensorflow_datasets" and not is_module_allowed(module):
            raise ForeignFeature(
                f"the features.json of a data set names the class {python_class_name!r}, which "
                f"would import the module {module} and run its code; if you trust that code, add "
                f"--allow_import={module.partition('.')[0]}, otherwise delete the data set"
            )
        return find_class(cls, python_class_name)

    connector.cls_from_name = classmethod(find_allowed_class)


def _is_prepared(builder: Any) -> bool:
    # TFDS renames a data set into place when it is complete. The builder's own is_prepared() gives
    # the same answer, but logs a warning if the data set does not exist yet.
    return (builder.data_path / "dataset_info.json").exists()


def _prepare(builder: Any, name: str) -> None:
    logger.info("Building the data set %s in %s", builder.info.full_name, builder.data_path)
    try:
        # The project's own data sets take a second and need no download, so the progress bars and
        # messages of TFDS would only be noise.
        with _quiet() if name in _OWN else contextlib.nullcontext():
            _encode_without_tensorflow(builder)
            builder.download_and_prepare()
    # TFDS has no common base class for errors of the network, the disk, libraries and checksums.
    except Exception as error:
        raise ValueError(
            f"data.name={name!r} could not be downloaded or built in {builder.data_path}: "
            f"{_first_line(error)}; fix the cause, or copy a prepared data set there"
        ) from error


def _encode_without_tensorflow(builder: Any) -> None:
    """Make a builder encode image arrays with Pillow, because TFDS itself needs TensorFlow."""
    if importlib.util.find_spec("tensorflow") is not None:
        return
    import tensorflow_datasets as tfds
    from PIL import Image

    def encoded(array: Any, encoding: str) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(stream, encoding)
        return stream.getvalue()

    for feature in builder.info.features.values():
        encoder = getattr(feature, "_image_encoder", None)
        if isinstance(feature, tfds.features.Image) and encoder and encoder.np_dtype == np.uint8:
            encoding = encoder.encoding_format or "png"
            encoder._encode_image = functools.partial(encoded, encoding=encoding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"the nearest known names are {near}"
    return f"the known names are {sorted(known)[:10]}" + (" and more" if len(known) > 10 else "")


def _first_line(error: Exception) -> str:
    # TFDS re-raises an error several times, each time with more context; the innermost one has the
    # reason. Its message begins with the arguments of TFDS's own call, in braces.
    while isinstance(error.__cause__, type(error)):
        error = error.__cause__
    message = str(error).rpartition('}": ')[2].strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no reason given'}"
