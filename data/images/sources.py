"""The interface of image data sets, and the choice of the images to hold out and to train on."""

import abc
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from PIL import Image

from data.config import DataConfig
from data.examples import Label
from data.image_config import ImageConfig


class Fields(NamedTuple):
    """What is read besides an image: at most one of these."""

    label: str | None  # name of the label; None if the objective needs none
    caption: str | None  # name of the caption


class Sample(NamedTuple):
    """An image, encoded, with its label or caption."""

    image: bytes
    label: object
    caption: str | None
    place: str  # names it in messages


class ImageSource(abc.ABC):
    """A sequence of images with class numbers.

    Sources are pickled and sent to worker processes, where the copy reads the same images.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and the number of its class. An encoded image is not decoded yet.

        Raises:
            Exception: The image cannot be opened.
        """

    @abc.abstractmethod
    def place(self, index: int) -> str:
        """Return a description of where the image is stored, such as its path, for messages."""


class SelectedImages(ImageSource):
    """A selection of the images of a source.

    Args:
        positions: int64[number of selected images]: their numbers in the source.
    """

    def __init__(self, source: ImageSource, positions: np.ndarray):
        self._source = source
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return a selected image and the number of its class."""
        return self._source.read(int(self._positions[index]))

    def place(self, index: int) -> str:
        """Return where a selected image is stored."""
        return self._source.place(int(self._positions[index]))


@dataclass(frozen=True, kw_only=True)
class Split:
    """The images of one split.

    Attributes:
        names: bytes[number of images], unique names, which stay the same if other images are added.
        labels: int[number of images], the number of each image's class.
    """

    source: ImageSource
    names: np.ndarray
    labels: np.ndarray

    def chosen(self, positions: np.ndarray) -> "Split":
        """Return the split of the images at these positions."""
        return Split(
            source=SelectedImages(self.source, positions),
            names=self.names[positions],
            labels=self.labels[positions],
        )


def numbered_names(count: int) -> np.ndarray:
    """Return bytes[count], names for images that have none of their own: their numbers."""
    return np.arange(count).astype(np.bytes_)


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """An image data set that has been found and checked.

    Attributes:
        validation: validation images; None if the data set has no validation split.
        named_validation: name -> images, for the sets that the config names; "" has no name.
        classes: classes in the order of their numbers; empty if the objective needs no labels.
        key: string that identifies the content of the data set.
        contents: string that also covers the contents of files if `key` covers only their sizes
            and `data.verify` is "full"; otherwise empty.
    """

    train: Split
    validation: Split | None
    classes: tuple[Label, ...]
    key: str
    contents: str = ""
    named_validation: Mapping[str, Split] = field(default_factory=dict)


def hold_out(found: ImageDataset, config: DataConfig, images: ImageConfig) -> ImageDataset:
    """Hold out a validation split if there is none, and select a fraction of the training images.

    Both take the same fraction of each class. The choice depends only on the names of the images,
    so a smaller fraction is a subset of a larger one.

    Returns:
        The data set with a validation split, which may be empty, and with new keys.
    """
    train = found.train
    validation = found.validation
    choice = ""
    if validation is None:
        fraction = config.held_out_fraction
        is_held = _chosen_of_each(train, fraction, b"validation", spared=1)
        if fraction and len(is_held) > 1 and not is_held.any():
            is_held[np.argmin(_hashes(train, b"validation"))] = True
        validation = train.chosen(np.flatnonzero(is_held))
        train = train.chosen(np.flatnonzero(~is_held))
        choice += f" {fraction}"
    if images.train_fraction < 1:
        is_used = _chosen_of_each(train, images.train_fraction, b"train", least=1)
        train = train.chosen(np.flatnonzero(is_used))
        choice += f" {images.train_fraction}"
    return replace(
        found,
        train=train,
        validation=validation,
        key=hashlib.sha256((found.key + choice).encode()).hexdigest(),
        contents=found.contents and hashlib.sha256((found.contents + choice).encode()).hexdigest(),
    )


def _chosen_of_each(
    split: Split, fraction: float, purpose: bytes, *, least: int = 0, spared: int = 0
) -> np.ndarray:
    """Choose a fraction of each class by the hashes of the images' names: bool[number of images].

    Args:
        fraction: fraction of each class to choose, rounded to whole images.
        purpose: key of the hash, so that choices for different purposes are independent.
        least: minimum number of images to choose from each class.
        spared: number of images of each class that are never chosen.
    """
    is_chosen = np.zeros(len(split.names), bool)
    if not fraction:
        return is_chosen
    ranks = _hashes(split, purpose)
    # Sort by class, and within a class by hash. Each class is then one contiguous run.
    order = np.lexsort((ranks, split.labels))
    starts = np.flatnonzero(np.diff(split.labels[order], prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        size = int(stop - start)
        count = min(max(round(size * fraction), least), size - spared)
        is_chosen[order[start : start + count]] = True
    return is_chosen


def _hashes(split: Split, purpose: bytes) -> np.ndarray:
    digests = (hashlib.blake2b(name, digest_size=8, key=purpose).digest() for name in split.names)
    return np.frombuffer(b"".join(digests), ">u8")
