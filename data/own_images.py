"""Images of the user's own: what a function returns."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from data.config import DataConfig
from data.crops import open_image
from data.examples import Label
from data.image_check import problem_of, report
from data.image_config import ImageConfig
from data.image_sources import Found, ImageSource, Numbered, Split
from data.own import SPLITS, call_own

_WHAT = "(image, label)"


class OwnImages(ImageSource):
    """A sequence of (image, label), each checked when read.

    A copy in another process calls the user's function again there.

    Args:
        name: The function's import path.
        split: Of what it returned.
        values: That.

    Attributes:
        label_numbers: Of all labels; empty where none are learnt.
    """

    def __init__(self, name: str, split: str, values: Sequence[Any]):
        self._name, self._split = name, split
        self._values: Sequence[Any] | None = values
        self.label_numbers: dict[Label, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None}

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> Sequence[Any]:
        """What the user's function returned."""
        if self._values is None:
            self._values = _call_again(self._name)[self._split]
        return self._values

    def item(self, index: int) -> tuple[Any, Label]:
        """Returns the image as the user has it, and its label.

        Raises:
            ValueError: It is no pair of an image and a label.
        """
        item = self.values[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(
                f"{self.place(index)} is a {type(item).__name__}, but must be a pair (image, label)"
            )
        image, label = item
        label = int(label) if isinstance(label, np.integer) else label
        is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
        if not is_number and not (isinstance(label, str) and label):
            raise ValueError(
                f"{self.place(index)} has the label {label!r}, but must have a string or a whole "
                "number of at least 0"
            )
        return image, label

    def read(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.item(index)
        return open_image(image), self.label_numbers.get(label, 0)

    def place(self, index: int) -> str:
        return f"data.name={self._name!r}: image {index} of {self._split!r}"


@functools.cache  # For both splits.
def _call_again(name: str) -> Mapping[str, Sequence[Any]]:
    return call_own(name, _WHAT)


def find_own_images(config: DataConfig, images: ImageConfig) -> Found:
    """Returns the images of a function of the user's, each of which is read and checked.

    Raises:
        ValueError: There is no such function, or it returns something else, or images are broken,
            or validation has a label that training lacks.
    """
    returned = call_own(config.name, _WHAT)
    sources = [OwnImages(config.name, split, returned[split]) for split in SPLITS]
    digest = hashlib.sha256()
    scans = [_scan(source, digest, images) for source in sources]
    classes: tuple[Label, ...] = ()
    if config.objective == "image_classification":
        classes = _find_classes(sources, scans)
    known = {label: i for i, label in enumerate(classes)}
    splits = []
    for source, (positions, labels) in zip(sources, scans, strict=True):
        source.label_numbers = known
        numbered = np.array([known.get(label, 0) for label in labels], np.int32)
        split = Split(
            source=source,
            names=Numbered(len(source)),
            labels=_scattered(numbered, positions, len(source)).copy,
        )
        splits.append(split.chosen(positions) if len(positions) < len(source) else split)
    return Found(
        train=splits[0], validation=splits[1], classes=classes, key=f"own {digest.hexdigest()}"
    )


def _scan(source: OwnImages, digest: Any, images: ImageConfig) -> tuple[np.ndarray, list[Label]]:
    """Returns the numbers of the images that can be read, and their labels; adds to the hash."""
    problems, labels = {}, []
    for index in range(len(source)):
        image, label = source.item(index)
        problem = problem_of(image)
        if problem is not None:
            problems[index] = problem
            continue
        labels.append(label)
        content = image if isinstance(image, bytes) else _content(open_image(image))
        digest.update(f"{label!r} {len(content)}\0".encode() + content)
    digest.update(f"{len(labels)}\0".encode())
    report(problems, len(source), source.place, images)
    positions = [index for index in range(len(source)) if index not in problems]
    return np.array(positions, np.int64), labels


def _content(image: Image.Image) -> bytes:
    return f"{image.mode} {image.size}".encode() + image.tobytes()


def _scattered(labels: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
    scattered = np.zeros(count, np.int32)
    scattered[positions] = labels
    return scattered


def _find_classes(
    sources: Sequence[OwnImages], scans: Sequence[tuple[np.ndarray, list[Label]]]
) -> tuple[Label, ...]:
    known = set(scans[0][1])
    if len({type(label) for label in known}) != 1 or len(known) < 2:
        some = ", ".join(sorted(map(repr, known))[:4]) or "none"
        raise ValueError(
            f"{sources[0].place(0)} and the others have the labels {some}, but there must be at "
            "least two, all strings or all whole numbers"
        )
    for position, label in zip(*scans[1], strict=True):
        if label not in known:
            raise ValueError(
                f"{sources[1].place(int(position))} has the label {label!r}, which no image of "
                "'train' has; add such images there, or take this one away"
            )
    return tuple(sorted(known))  # pyright: ignore[reportArgumentType]
