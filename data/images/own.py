"""Image data sets returned by a user's function."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from data.checks import is_int
from data.config import DataConfig
from data.examples import Label
from data.image_config import ImageConfig
from data.images.readability import problem_of, report
from data.images.sources import ImageDataset, ImageSource, Split, numbered_names
from data.images.transforms.crops import open_image
from data.own import SPLITS, call_own

_WHAT = "(image, label)"
# Index of a usable image -> (its label, a hash of the image and the label).
_Scan = dict[int, tuple[Label, bytes]]


class OwnImages(ImageSource):
    """A sequence of (image, label) returned by a user's function.

    When it is pickled, the values are left out; a worker process calls the user's function again.

    Args:
        name: import path of the function.
        values: sequence that the function returned for this split.

    Attributes:
        label_numbers: label -> its number; empty if the objective needs no labels.
    """

    def __init__(self, name: str, split: str, values: Sequence[Any]):
        self._name = name
        self.split = split
        self._values: Sequence[Any] | None = values
        self.label_numbers: dict[Label, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None}

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> Sequence[Any]:
        """The sequence that the user's function returned."""
        if self._values is None:
            self._values = _call_again(self._name)[self.split]
        return self._values

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and the number of its class, 0 if the objective needs no labels."""
        image, label = self.values[index]
        return open_image(image), self.label_numbers.get(label, 0)

    def place(self, index: int) -> str:
        """Return the function, the index and the split of an image, for messages."""
        return f"data.name={self._name!r}: image {index} of {self.split!r}"


@functools.cache  # One call provides both splits.
def _call_again(name: str) -> Mapping[str, Sequence[Any]]:
    return call_own(name, _WHAT)


def find_own_images(config: DataConfig, images: ImageConfig) -> ImageDataset:
    """Call the user's function, and find the images that it returns, without unusable ones.

    Args:
        config: config section `data`; `name` is the import path of the function.

    Raises:
        ValueError: There is no such function, or it returns anything else or fewer than two labels;
            or `images.on_broken` is 'refuse', and there are broken images, invalid labels, or
            validation labels that do not occur in training.
    """
    returned = call_own(config.name, _WHAT)
    sources = [OwnImages(config.name, split, returned[split]) for split in SPLITS]
    scans = [_scan(source, images) for source in sources]
    classes: tuple[Label, ...] = ()
    if config.objective == "image_classification":
        classes = _find_classes(sources[0], scans[0])
        scans[1] = _of_classes(sources, scans[1], set(classes), images)
    known = {label: i for i, label in enumerate(classes)}
    digest = hashlib.sha256()
    splits = []
    for source, scan in zip(sources, scans, strict=True):
        source.label_numbers = known
        digest.update(f"{len(scan)}\0".encode())
        labels = np.zeros(len(source), np.int32)
        for index, (label, content) in scan.items():
            labels[index] = known.get(label, 0)
            digest.update(content)
        split = Split(source=source, names=numbered_names(len(source)), labels=labels)
        splits.append(split.chosen(np.array(list(scan), np.int64)))
    return ImageDataset(
        train=splits[0],
        validation=None if config.validation_paths else splits[1],
        classes=classes,
        key=f"own {digest.hexdigest()}",
    )


def _scan(source: OwnImages, images: ImageConfig) -> _Scan:
    """Read every item of a source, report the bad ones, and return the ones that can be used."""
    problems = {}
    scan = {}
    for index in range(len(source)):
        try:
            item = source.values[index]
        except Exception as error:  # A user's sequence may raise anything.
            problems[index] = f"{type(error).__name__}: {error}"
            continue
        problem = _flaw(item) or problem_of(item[0])
        if problem is None:
            scan[index] = _label(item[1]), _digest(item)
        else:
            problems[index] = problem
    report(problems, len(source), source.place, images)
    return scan


def _flaw(item: Any) -> str | None:
    """Return why an item is not a pair of an image and a valid label, or None if it is one."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return f"it is a {type(item).__name__}, but must be a pair (image, label)"
    label = _label(item[1])
    if (is_int(label) and label >= 0) or (isinstance(label, str) and label):
        return None
    return f"its label {item[1]!r} must be a string or a whole number of at least 0"


def _label(label: Any) -> Any:
    return int(label) if isinstance(label, np.integer) else label


def _digest(item: Any) -> bytes:
    image, label = item
    if isinstance(image, bytes):
        content = image
    else:
        opened = open_image(image)
        content = f"{opened.mode} {opened.size}".encode() + opened.tobytes()
    header = f"{_label(label)!r} {len(content)}\0".encode()
    return hashlib.sha256(header + content).digest()


def _find_classes(source: OwnImages, scan: _Scan) -> tuple[Label, ...]:
    known = {label for label, _ in scan.values()}
    if len({type(label) for label in known}) != 1 or len(known) < 2:
        some = ", ".join(sorted(map(repr, known))[:4]) or "none"
        raise ValueError(
            f"{source.place(0)} and the other images must have at least two labels, all strings or "
            f"all whole numbers, but have {some}; fix the function"
        )
    return tuple(sorted(known))  # pyright: ignore[reportArgumentType]


def _of_classes(
    sources: Sequence[OwnImages], scan: _Scan, known: set[Label], images: ImageConfig
) -> _Scan:
    """Report validation images whose labels do not occur in training, and return the others."""
    train, validation = sources
    problems = {
        index: f"its label {label!r} does not occur in {train.split!r}"
        for index, (label, _) in scan.items()
        if label not in known
    }
    report(problems, len(validation), validation.place, images)
    return {index: entry for index, entry in scan.items() if index not in problems}
