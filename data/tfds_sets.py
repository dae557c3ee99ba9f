"""Sets of TFDS, the project's own among them: found, built once, and read by position.

Importing tensorflow_datasets takes most of a second, so every function here imports it itself.
"""

import contextlib
import difflib
import functools
import importlib.util
import io
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

# Sets that ship with the project: name -> the builder's import path.
_OWN = {
    "python_stdlib": "data.text.python_stdlib:PythonStdlib",
    "digits": "data.images.digits:Digits",
}

logger = logging.getLogger(__name__)


def open_builder(name: str, cache_path: Path, check: Callable[[Any], object]) -> Any:
    """Returns the prepared TFDS builder of this name; downloads and builds it on first use.

    Sets are kept in $TFDS_DATA_DIR, or in the cache directory where that is not set. Processes
    that start together build a set once.

    Args:
        name: Of the set.
        cache_path: The cache directory.
        check: Raises a ValueError if the builder is not of the kind that is wanted.

    Raises:
        ValueError: TFDS has no such set, or one of another kind, or could not prepare it.
    """
    if name in _OWN:
        data_dir = cache_path / "tensorflow_datasets"
    else:
        data_dir = Path(os.environ.get("TFDS_DATA_DIR") or cache_path / "tensorflow_datasets")
    data_dir = data_dir.expanduser()
    builder = _make_builder(name, data_dir)
    check(builder)  # Before much is downloaded.
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


def open_split(builder: Any, split: str, decoders: Any = None) -> Sequence[Any]:
    """Returns the examples of a split of a prepared set.

    Args:
        builder: Of the set.
        split: Its name.
        decoders: Of features that are read otherwise than TFDS does, as TFDS takes them.

    Raises:
        ValueError: The set has no random access.
    """
    try:
        return builder.as_data_source(split, decoders=decoders)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"data.name: the {split} split of the TFDS set {builder.info.full_name!r} at "
            f"{builder.data_path} cannot be read by position; delete the set there, so that it is "
            "built again as array_record, or set data.cache_dir to build it elsewhere"
        ) from error


def _make_builder(name: str, data_dir: Path) -> Any:
    import tensorflow_datasets as tfds

    if name in _OWN:
        return pkgutil.resolve_name(_OWN[name])(data_dir=data_dir, file_format="array_record")
    # TFDS registers its older sets group by group, and stops silently at a group whose optional
    # libraries are missing; naming the groups makes sure of them.
    import tensorflow_datasets.image_classification  # noqa: F401
    import tensorflow_datasets.text  # noqa: F401  # pyright: ignore[reportUnusedImport]

    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise ValueError(
            f"data.name={name!r} is not a TFDS set; {_nearest(name.partition('/')[0], known)}, "
            "or use 'python_stdlib', 'text', 'digits', 'image_folder', or "
            "'package.module:function' of your own"
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
        # The project's own sets take a second and need no download: TFDS's report of it would
        # only be noise.
        with _quiet() if name in _OWN else contextlib.nullcontext():
            _encode_without_tensorflow(builder)
            builder.download_and_prepare()
    except Exception as error:  # Network, disk, missing libraries, checksums: TFDS has no base.
        raise ValueError(
            f"data.name={name!r} could not be downloaded or built in {builder.data_path}: "
            f"{_first_line(error)}; mend that, or copy a prepared set there"
        ) from error


def _encode_without_tensorflow(builder: Any) -> None:
    """Lets Pillow encode the arrays of a set of images, for which TFDS would need TensorFlow."""
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
    return f"there are {sorted(known)[:10]}" + (", and more" if len(known) > 10 else "")


def _first_line(error: Exception) -> str:
    # TFDS puts the arguments of its own call, in braces, before what was wrong.
    # It raises errors again and again, each time saying where; the first one says what.
    while isinstance(error.__cause__, type(error)):
        error = error.__cause__
    message = str(error).rpartition('}": ')[2].strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no reason given'}"
