"""Sets of TFDS with images, the project's own `digits` among them."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.config import DataConfig
from data.crops import open_image
from data.image_sources import Found, ImageSource, Numbered, Split
from data.tfds_sets import builder_key, open_builder, open_split


class TfdsImages(ImageSource):
    """The images of a split of a prepared set, still encoded when they are read.

    A copy in another process opens the set again there.

    Args:
        directory: Of the set.
        split: Its name.
        features: The names of the image and of the label; without the latter all labels are 0.
        num_classes: That there are.
    """

    def __init__(
        self, directory: Path, split: str, features: tuple[str, str | None], num_classes: int
    ):
        self._directory, self._split, self._num_classes = directory, split, num_classes
        self._image, self._label = features
        self._source: Sequence[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def __len__(self) -> int:
        return len(self._open())

    def read(self, index: int) -> tuple[Image.Image, int]:
        example = self._open()[index]
        label = 0 if self._label is None else int(example[self._label])
        if self._label is not None and not 0 <= label < self._num_classes:
            raise ValueError(
                f"the label {label} is none of the {self._num_classes} classes, 0 to "
                f"{self._num_classes - 1}; choose a split with labels"
            )
        return open_image(bytes(example[self._image])), label

    def place(self, index: int) -> str:
        return f"image {index} of the split {self._split!r} in {self._directory}"

    def _open(self) -> Sequence[Any]:
        if self._source is None:
            import tensorflow_datasets as tfds

            builder = tfds.builder_from_directory(str(self._directory))
            decoders = {self._image: tfds.decode.SkipDecoding()}
            self._source = open_split(builder, self._split, decoders)
        return self._source


def find_tfds_images(config: DataConfig) -> Found:
    """Returns the images of the TFDS set that `data.name` names.

    Its validation split is the set's own 'validation', or else its 'test'.

    Raises:
        ValueError: There is no such set, or it has no images, no labels, no train split.
    """
    has_labels = config.objective == "image_classification"

    def features_of(builder: Any) -> tuple[str, str | None]:
        return _image_feature(builder), _label_feature(builder, config) if has_labels else None

    builder = open_builder(config.name, config.cache_path, features_of)
    features, splits = features_of(builder), builder.info.splits
    if "train" not in splits:
        raise ValueError(
            f"data.name: the TFDS set {builder.info.full_name!r} has the splits {sorted(splits)}, "
            "but no 'train'; choose a set that has one"
        )
    label = features[1]
    classes = tuple(builder.info.features[label].names) if label is not None else ()
    held_out = next((name for name in ("validation", "test") if name in splits), None)

    def split(name: str) -> Split:
        source = TfdsImages(Path(os.fspath(builder.data_path)), name, features, len(classes))
        return Split(
            source=source,
            names=Numbered(len(source)),
            labels=lambda: _read_labels(source, config, f"{builder_key(builder)} {name} {label}"),
        )

    return Found(
        train=split("train"),
        validation=None if held_out is None else split(held_out),
        classes=classes,
        key=f"tfds {builder_key(builder)} {features}",
    )


def _read_labels(source: TfdsImages, config: DataConfig, key: str) -> np.ndarray:
    """Returns the labels of all images, which are read once for them, and cached."""
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    cache = config.cache_path / f"labels-{name}.npy"
    if not cache.exists():
        labels = np.array([source.read(index)[1] for index in range(len(source))], np.int32)
        new = cache.with_suffix(".tmp.npy")
        np.save(new, labels)
        new.replace(cache)
    return np.load(cache)


def _image_feature(builder: Any) -> str:
    import tensorflow_datasets as tfds

    features = builder.info.features
    found = [name for name, value in features.items() if isinstance(value, tfds.features.Image)]
    if "image" in found or len(found) == 1:
        return "image" if "image" in found else found[0]
    raise ValueError(
        f"data.name: the TFDS set {builder.info.full_name!r} has the features {sorted(features)}, "
        f"and {f'the images {found}' if found else 'none of them is an image'}; choose a set with "
        "one image an example"
    )


def _label_feature(builder: Any, config: DataConfig) -> str:
    import tensorflow_datasets as tfds

    found = [
        name
        for name, value in builder.info.features.items()
        if isinstance(value, tfds.features.ClassLabel)
    ]
    if config.label_field in found:
        return config.label_field
    # The default name stands for "the label", whatever the set calls it.
    if config.label_field == "label" and len(found) == 1:
        return found[0]
    remedy = f"set data.label_field to one of {found}" if found else "choose a set with classes"
    raise ValueError(
        f"data.label_field={config.label_field!r} is no class of the TFDS set "
        f"{builder.info.full_name!r}; {remedy}"
    )
