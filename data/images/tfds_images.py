"""TFDS data sets of images, including this project's own `digits`."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.cache import read_array, write_array
from data.checks import first_names
from data.config import DataConfig
from data.examples import Label
from data.image_config import ImageConfig
from data.images.readability import find_problems, problem_of, report
from data.images.sources import ImageDataset, ImageSource, Split, numbered_names
from data.images.transforms.crops import open_image
from data.tfds_sets import builder_key, open_builder, open_split, splits_of
from data.validation import validation_sources
from untrusted.cached import locked

# Stored in place of the label of an image that cannot be read.
_BROKEN = np.iinfo(np.int64).min


class TfdsImages(ImageSource):
    """The images of a split of a prepared data set, read without decoding them.

    When it is pickled, the open data set is left out; a worker process opens it again.

    Args:
        features: names of the image and the label feature; if the latter is None, all labels
            are 0.
    """

    def __init__(self, directory: Path, split: str, features: tuple[str, str | None]):
        self._directory = directory
        self._split = split
        self._image, self._label = features
        self._source: Sequence[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def __len__(self) -> int:
        return len(self._open())

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image, not decoded yet, and its label."""
        content, label = self.encoded(index)
        return open_image(content), label

    def encoded(self, index: int) -> tuple[bytes, int]:
        """Return the encoded bytes of an image, and its label."""
        example = self._open()[index]
        return bytes(example[self._image]), 0 if self._label is None else int(example[self._label])

    def place(self, index: int) -> str:
        """Return the number, the split and the directory of an image, for messages."""
        return f"image {index} of the split {self._split!r} in {self._directory}"

    def _open(self) -> Sequence[Any]:
        if self._source is None:
            import tensorflow_datasets as tfds

            builder = tfds.builder_from_directory(str(self._directory))
            decoders = {self._image: tfds.decode.SkipDecoding()}
            self._source = open_split(builder, self._split, decoders)
        return self._source


def find_tfds_images(config: DataConfig, images: ImageConfig) -> ImageDataset:
    """Find the images of the TFDS data set `data.name`, without those that cannot be used.

    Without `data.validation_splits`, the validation split is the data set's own 'validation' split
    or, if there is none, its 'test' split.

    Raises:
        ValueError: There is no such data set, or it has no images, no labels or no split of a given
            name; or `images.on_broken` is 'refuse', and there are broken images or invalid labels.
    """
    image_set = _ImageSet(config, images)
    held_out = next((name for name in ("validation", "test") if name in image_set.splits), None)
    if config.names_validation:
        held_out = None
    return ImageDataset(
        train=image_set.split(config.split),
        validation=None if held_out is None else image_set.split(held_out),
        classes=image_set.classes,
        key=f"tfds {image_set.key}" + (f" {config.split}" if config.split != "train" else ""),
    )


def find_tfds_validation(
    labels: Sequence[Label], config: DataConfig, images: ImageConfig
) -> dict[str, Split]:
    """Find the images of each split of `data.validation_splits`, by its name.

    Args:
        labels: labels that the model has learned; empty if it has none.

    Raises:
        ValueError: As for `find_tfds_images`; or the labels are not the classes of the data set.
    """
    image_set = _ImageSet(config, images)
    if tuple(map(str, labels)) != image_set.classes:
        raise ValueError(
            f"data.validation_splits: data.name={config.name!r} has the classes "
            f"{first_names([*map(repr, image_set.classes)])}, but the model has learned "
            f"{first_names([*map(repr, labels)])}; choose the data set that it was trained on"
        )
    sources = validation_sources(config)
    return {name: image_set.split(source.split) for name, source in sources.items()}


class _ImageSet:
    """A prepared data set with images.

    Attributes:
        splits: names of its splits.
        classes: names of its classes; empty if the objective needs no labels.
        key: string that identifies its content.
    """

    def __init__(self, config: DataConfig, images: ImageConfig):
        has_labels = config.objective == "image_classification"

        def features_of(builder: Any) -> tuple[str, str | None]:
            return _image_feature(builder), _label_feature(builder, config) if has_labels else None

        self._config = config
        self._images = images
        self._builder = open_builder(config.name, config.cache_path, features_of)
        self._features = features_of(self._builder)
        self.splits = splits_of(self._builder, config)
        label = self._features[1]
        names = () if label is None else self._builder.info.features[label].names
        self.classes = tuple(names)
        self.key = f"{builder_key(self._builder)} {self._features}"

    def split(self, name: str) -> Split:
        """Return the images of a split that can be used."""
        directory = Path(os.fspath(self._builder.data_path))
        source = TfdsImages(directory, name, self._features)
        key = f"{builder_key(self._builder)} {name} {self._features}"
        labels = _read_labels(source, self._config, key)
        all_images = Split(source=source, names=numbered_names(len(source)), labels=labels)
        positions = _usable(source, labels, max(len(self.classes), 1), self._images)
        return all_images.chosen(positions)


def _read_labels(source: TfdsImages, config: DataConfig, key: str) -> np.ndarray:
    """Return int64[number of images]: the label of each image, or _BROKEN if it cannot be read.

    The labels are cached, so images are read only once, except that broken ones are tried again at
    each start. If several processes start together, one of them reads the images.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    cache = config.cache_path / f"labels-{name}.array"
    with locked(cache):
        labels = read_array(cache)
        if labels is None or len(labels) != len(source):
            labels = np.full(len(source), _BROKEN)

        def check(index: int) -> str | None:
            content, label = source.encoded(index)
            problem = problem_of(content)
            if problem is None:
                labels[index] = label
            return problem

        unknown = np.flatnonzero(labels == _BROKEN)
        if len(find_problems(check, unknown.tolist())) < len(unknown):
            write_array(cache, labels)
    return labels


def _usable(
    source: TfdsImages, labels: np.ndarray, num_classes: int, images: ImageConfig
) -> np.ndarray:
    """Return int64[number of usable images]: the numbers of the images that can be used.

    Raises:
        ValueError: Some images cannot be used, and `images.on_broken` is 'refuse'; or none can.
    """

    def problem(label: int, index: int) -> str:
        if label == _BROKEN:
            return problem_of(source.encoded(index)[0]) or "it could not be read"
        return f"its label {label} must be one of the {num_classes} classes 0 to {num_classes - 1}"

    is_usable = (labels >= 0) & (labels < num_classes)
    problems = {int(i): problem(int(labels[i]), int(i)) for i in np.flatnonzero(~is_usable)}
    report(problems, len(source), source.place, images)
    if not is_usable.any():
        raise ValueError(
            f"{source.place(0)} and all other images cannot be used; choose another data set"
        )
    return np.flatnonzero(is_usable)


def _image_feature(builder: Any) -> str:
    import tensorflow_datasets as tfds

    features = builder.info.features
    names = [name for name, value in features.items() if isinstance(value, tfds.features.Image)]
    if "image" in names or len(names) == 1:
        return "image" if "image" in names else names[0]
    raise ValueError(
        f"data.name: the TFDS set {builder.info.full_name!r} has the features {sorted(features)}, "
        f"and {f'the images {names}' if names else 'none of them is an image'}; choose a data set "
        "with one image per example"
    )


def _label_feature(builder: Any, config: DataConfig) -> str:
    import tensorflow_datasets as tfds

    names = [
        name
        for name, value in builder.info.features.items()
        if isinstance(value, tfds.features.ClassLabel)
    ]
    if config.label_field in names:
        return config.label_field
    # With the default field name, the only label feature is used regardless of its name.
    if config.label_field == "label" and len(names) == 1:
        return names[0]
    remedy = f"set data.label_field to one of {names}" if names else "choose a set with classes"
    raise ValueError(
        f"data.label_field={config.label_field!r} is not a class feature of the TFDS set "
        f"{builder.info.full_name!r}; {remedy}"
    )
