"""Where images come from: what `data.name` names, as images and labels by position."""

import abc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from data.config import DataConfig
from data.examples import Label
from data.image_config import ImageConfig


class ImageSource(abc.ABC):
    """Images by position; a copy in another process reads the same ones."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image, not decoded yet if it is encoded, and the number of its class.

        Raises:
            Exception: The image cannot be opened.
        """

    @abc.abstractmethod
    def place(self, index: int) -> str:
        """Returns where the image lies, for messages."""


class SelectedImages(ImageSource):
    """Some images of a source.

    Args:
        source: All of them.
        positions: int64[number of images]: which.
    """

    def __init__(self, source: ImageSource, positions: np.ndarray):
        self._source, self._positions = source, positions

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return self._source.read(int(self._positions[index]))

    def place(self, index: int) -> str:
        return self._source.place(int(self._positions[index]))


@dataclass(frozen=True, kw_only=True)
class Split:
    """The images of a split that was found.

    Attributes:
        source: All of them.
        names: What tells each from the others for good, whatever else the data has.
        labels: Returns int[number of images]: of each, the number of its class; may read all of
            them once.
    """

    source: ImageSource
    names: Sequence[bytes]
    labels: Callable[[], np.ndarray]

    def chosen(self, positions: np.ndarray) -> "Split":
        """Returns the split with some of its images alone."""
        return Split(
            source=SelectedImages(self.source, positions),
            names=SelectedNames(self.names, positions),
            labels=lambda: self.labels()[positions],
        )


class SelectedNames(Sequence[bytes]):
    """Names of some images, looked up when they are asked for."""

    def __init__(self, names: Sequence[bytes], positions: np.ndarray):
        self._names, self._positions = names, positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._names[int(self._positions[index])]


class NumberedNames(Sequence[bytes]):
    """Names of images that have none: their numbers."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < self._count:
            raise IndexError(f"image {index} of {self._count}")
        return str(index).encode()


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """A data set of images that has been found.

    Attributes:
        train: The training images.
        validation: The validation images; None where the data set has none of its own.
        classes: In the order of their numbers; empty where there are none.
        key: A hash of all that tells this data set from another.
    """

    train: Split
    validation: Split | None
    classes: tuple[Label, ...]
    key: str


def hold_out(found: ImageDataset, config: DataConfig, images: ImageConfig) -> ImageDataset:
    """Returns the data set with a validation split, and the wanted part of its training images.

    The same part of each class goes to validation, and of the rest the same part is trained on.
    Which images these are hangs on their names alone, so that a smaller part lies within a larger.
    """
    train, validation, key = found.train, found.validation, found.key
    if validation is None:
        is_held = chosen_of_each(train, config.validation_fraction, b"validation", spared=1)
        if config.validation_fraction and len(is_held) > 1 and not is_held.any():
            is_held[_first(train, b"validation")] = True
        validation = train.chosen(np.flatnonzero(is_held))
        train = train.chosen(np.flatnonzero(~is_held))
        key += f" {config.validation_fraction}"
    if images.train_fraction < 1:
        is_used = chosen_of_each(train, images.train_fraction, b"train", least=1)
        train = train.chosen(np.flatnonzero(is_used))
        key += f" {images.train_fraction}"
    return replace(
        found, train=train, validation=validation, key=hashlib.sha256(key.encode()).hexdigest()
    )


def chosen_of_each(
    split: Split, fraction: float, purpose: bytes, *, least: int = 0, spared: int = 0
) -> np.ndarray:
    """Returns bool[number of images]: which belong to a part of each class.

    Args:
        split: Of all images.
        fraction: Of each class, rounded to whole images.
        purpose: Each has a choice of its own.
        least: So many of each class at least.
        spared: So many of each class are not chosen.
    """
    is_chosen = np.zeros(len(split.names), bool)
    if not fraction:
        return is_chosen
    labels, ranks = split.labels(), _hashes(split, purpose)
    order = np.lexsort((ranks, labels))
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        size = int(stop - start)
        count = min(max(round(size * fraction), least), size - spared)
        is_chosen[order[start : start + count]] = True
    return is_chosen


def _first(split: Split, purpose: bytes) -> int:
    return int(np.argmin(_hashes(split, purpose)))


def _hashes(split: Split, purpose: bytes) -> np.ndarray:
    def hashed(name: bytes) -> int:
        digest = hashlib.blake2b(name, digest_size=8, key=purpose).digest()
        return int.from_bytes(digest, "big")

    return np.fromiter(map(hashed, split.names), np.uint64, len(split.names))
