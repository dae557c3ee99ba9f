"""Load a corpus of images, and build the rows of its batches.

R: rows, S: height and width in pixels, C: channels.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from data.cache import make_cache
from data.config import DataConfig
from data.examples import (
    EVALUATION,
    PAIR,
    TRAIN,
    Batch,
    BrokenExample,
    Corpus,
    Example,
    Examples,
    Label,
    NoExamples,
    generator,
    stack,
)
from data.image_config import ImageConfig
from data.images.folder import find_validation_folders
from data.images.sources import ImageDataset, ImageSource, Split, hold_out
from data.images.transforms.augment import augment, central
from data.images.transforms.mixing import draw_mix
from data.images.workers import Workers
from data.shapes import example_shapes
from untrusted.imports import is_import_path

# Appended to the random key of a row to make the key of its mask.
_MASK = 1
# Name of the training images among the targets of workers; no validation set can have it.
_TRAIN = "<train>"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExampleRequest:
    """Everything needed to build one row of the train stream, in this process or in a worker.

    Attributes:
        element: number of the row in the stream.
        seed: with `element`, the seed of everything random in the row.
        index: number of the row's image.
        other: number of the image that is mixed into it, which is the image of element ^ 1;
            None if images are not mixed.
    """

    element: int
    seed: int
    index: int
    other: int | None = None


class Images(Examples):
    """The rows of a split of images; `data.shapes` lists their keys."""

    def __init__(self, source: ImageSource, data: DataConfig, images: ImageConfig):
        self._source = source
        self._data = data
        self._images = images
        self._split = ""
        self._workers = None
        self._shapes = example_shapes(data, images)
        self._lost: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None}

    def __len__(self) -> int:
        return len(self._source)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    def read_in(self, workers: Workers, split: str) -> None:
        """Read rows in worker processes from now on.

        Args:
            workers: workers, which have a copy of this object.
            split: name of that copy among the targets of the workers.
        """
        self._workers = workers
        self._split = split

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        """Return row `index`, augmented at random but not mixed; see `Examples.example`."""
        return self._row(index, key, augments=True)

    def __getitem__(self, index: int) -> Example:
        """Return row `index` as evaluations read it, with the central crop of the image.

        For image_contrast the two views are random, as in training, but depend on `index` alone.
        """
        self._check(index)
        return self._row(index, (EVALUATION, index), augments=False)

    def train_batch(self, elements: Sequence[int], order: Callable[[int], int], seed: int) -> Batch:
        """Return a batch of elements of the train stream; see `Examples.train_batch`."""
        places = [self._place(element, order, seed) for element in elements]
        return self._read("train_rows", sorted(places, key=lambda p: p.element), elements)

    def evaluation_batch(self, indices: Sequence[int]) -> Batch:
        """Return a batch of rows as evaluations read them."""
        return self._read("evaluation_rows", sorted(indices), indices)

    def train_rows(self, places: Sequence[ExampleRequest]) -> Batch:
        """Return a batch of the requested rows of the train stream."""
        seed = places[0].seed
        # Mixing a row needs both images of its pair. If both rows of a pair are requested, each
        # image is still read only once.
        indices = {place.element: place.index for place in places}
        indices |= {place.element ^ 1: place.other for place in places if place.other is not None}
        rows = {
            element: self.example(index, (TRAIN, seed, element))
            for element, index in indices.items()
        }
        if not self._images.mixes:
            return stack([rows[place.element] for place in places])
        return stack([self._mixed(rows, place) for place in places])

    def evaluation_rows(self, indices: Sequence[int]) -> Batch:
        """Return a batch of rows as evaluations read them, read in this process."""
        return stack([self[index] for index in indices])

    def _read(self, method: str, arguments: Sequence[Any], wanted: Sequence[int]) -> Batch:
        """Call a method that builds rows, in worker processes if there are any.

        Args:
            method: "train_rows" or "evaluation_rows".
            arguments: arguments of all rows, sorted, so that a pair of rows is not split
                between two workers.
            wanted: number of each row, in the order of the result.
        """
        if self._workers is None:
            batch = getattr(self, method)(arguments)
        else:
            calls = self._workers.shares(arguments)
            parts = self._workers.map(self._split, method, calls)
            batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if list(wanted) == sorted(wanted):
            return batch
        # The rank of each wanted row is its position among the sorted rows.
        places = np.argsort(np.argsort(np.array(wanted), kind="stable"))
        return {name: values[places] for name, values in batch.items()}

    def _place(self, element: int, order: Callable[[int], int], seed: int) -> ExampleRequest:
        other = order(self._number(element ^ 1)) if self._images.mixes else None
        index = order(self._number(element))
        return ExampleRequest(element=element, seed=seed, index=index, other=other)

    def _number(self, element: int) -> int:
        """Return the number of the draw from the shuffled images that provides this element.

        Without repeats, it is the element itself. With repeats, a batch draws fewer images and goes
        through them in rounds, so that neighboring rows, which are mixed with each other, have
        different images. For example, with a batch size of 6 and 2 repeats, draws are

            element  0 1 2 3 4 5 | 6 7 8 9 ...
            draw     0 1 2 0 1 2 | 3 4 5 3 ...
        """
        size = self._data.global_batch_size
        repeats = self._images.repeats
        batch, row = divmod(element, size)
        num_images = -(-size // repeats)
        return batch * num_images + row % num_images

    def _row(self, index: int, key: tuple[int, ...], *, augments: bool) -> Example:
        try:
            image, label = self._source.read(index)
            pixels = self._pixels(image, key, augments=augments)
        except Exception as error:  # For a broken file, Pillow's decoders raise many types.
            return self._lose(index, error)
        row: Example = {"images": pixels, "weights": np.array(1, np.float32)}
        if self._data.objective == "image_reconstruction":
            row["mask_seeds"] = np.array(generator((*key, _MASK)).integers(2**32), np.uint32)
        row |= self._targets(label)
        return row

    def _targets(self, label: int) -> Example:
        """Return the arrays of a row that depend on the label of its image."""
        row: Example = {}
        if self._data.objective == "image_classification":
            row["targets"] = np.array(label, np.int32)
            if self._images.mixes:
                row["other_targets"] = row["targets"]
                row["target_shares"] = np.array(1, np.float32)
        return row

    def _lose(self, index: int, error: Exception) -> Example:
        """Return a row of zeros, with weight 0, in place of an image that broke after the check.

        Raises:
            BrokenExample: `images.on_broken` is 'refuse'.
        """
        what = f"{self._source.place(index)} cannot be read: {type(error).__name__}: {error}"
        if self._images.on_broken == "refuse":
            raise BrokenExample(
                f"{what}; fix it and start again, or set images.on_broken='skip' in a new run"
            ) from error
        if index not in self._lost:
            self._lost.add(index)
            logger.warning("%s; left out (%d so far in this process)", what, len(self._lost))
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}

    def _pixels(self, image: Image.Image, key: tuple[int, ...], *, augments: bool) -> np.ndarray:
        """Return uint8[S, S, C], or, for image_contrast, uint8[2, S, S, C]."""
        config = self._images
        random = generator(key)
        if self._data.objective == "image_contrast":
            image.load()  # Decode the whole image, because each view may need another part of it.
            return np.stack([augment(image, config, random, view) for view in (0, 1)])
        return augment(image, config, random) if augments else central(image, config)

    def _mixed(self, rows: dict[int, Example], place: ExampleRequest) -> Example:
        """Mix a row with the other row of its pair, unless one of them is broken."""
        # Elements 2i and 2i+1 form a pair, and n ^ 1 is the other element of the pair of n.
        row = rows[place.element]
        other = rows[place.element ^ 1]
        if not (row["weights"] and other["weights"]):
            return row
        # The key is the same for both rows of a pair, so they use the same share and box.
        mix = draw_mix(self._images, generator((PAIR, place.seed, place.element // 2)))
        return {
            **row,
            "images": mix(row["images"], other["images"]),
            "other_targets": other["targets"],
            "target_shares": np.array(mix.share, np.float32),
        }


def load_images(config: DataConfig, images: ImageConfig) -> Corpus:
    """Find and check a corpus of images; data sets are prepared on first use.

    Raises:
        ValueError: The data set is unknown, broken or unsuitable for the objective, or has too few
            images for one batch.
        FileNotFoundError: A folder does not exist.
    """
    make_cache(config)
    dataset = hold_out(_find(config, images), config, images)
    named = _find_validation(dataset.classes, config, images)
    dataset = replace(dataset, named_validation=named)
    train, sets = open_splits(
        dataset, config, images, lambda source: Images(source, config, images)
    )
    corpus = Corpus(
        train=train,
        validation=NoExamples(),
        fingerprint=dataset.key,
        contents=dataset.contents,
        labels=dataset.classes,
    )
    return corpus.with_validation(sets)


def load_validation_images(
    config: DataConfig, images: ImageConfig, labels: tuple[Label, ...]
) -> Corpus:
    """Load the images of the validation sets that the config names, without training data.

    Args:
        labels: labels that the model has learned.

    Raises:
        ValueError: A folder has no usable images.
        FileNotFoundError: A folder does not exist.
    """
    make_cache(config)
    sets = {
        name: Images(split.source, config, images)
        for name, split in _find_validation(labels, config, images).items()
    }
    _read_in_workers(sets, images)
    corpus = Corpus(train=NoExamples(), validation=NoExamples(), fingerprint="", labels=labels)
    return corpus.with_validation(sets)


def open_splits(
    dataset: ImageDataset,
    config: DataConfig,
    images: ImageConfig,
    make_rows: Callable[[ImageSource], Images],
) -> tuple[Images, dict[str, Images]]:
    """Return the rows of the training images, and of each validation set by its name.

    They may be read in worker processes.

    Args:
        dataset: images, with a validation split.
        config: config section `data`.
        images: config section `images`.
        make_rows: returns the rows of a split.

    Raises:
        ValueError: There are too few images for one batch.
    """
    assert dataset.validation is not None
    num_images = len(dataset.train.source)
    needed = -(-config.global_batch_size // images.repeats)
    if num_images < needed:
        raise ValueError(
            f"data.global_batch_size={config.global_batch_size} with images.repeats="
            f"{images.repeats} needs {needed} training images, but "
            f"data.name={config.name!r} has {num_images} with data.validation_fraction="
            f"{config.held_out_fraction} and images.train_fraction={images.train_fraction}; "
            "reduce the batch size, or add images"
        )
    train = make_rows(dataset.train.source)
    splits = dataset.named_validation or {"": dataset.validation}
    sets = {name: make_rows(split.source) for name, split in splits.items()}
    _read_in_workers({**sets, _TRAIN: train}, images)
    return train, sets


def _read_in_workers(targets: Mapping[str, Images], images: ImageConfig) -> None:
    """Read rows in worker processes from now on, if `images.num_workers` asks for it."""
    if images.num_workers:
        workers = Workers(images.num_workers, targets, f"images.num_workers={images.num_workers}")
        for split, rows in targets.items():
            rows.read_in(workers, split)


def _find(config: DataConfig, images: ImageConfig) -> ImageDataset:
    if config.name == "image_folder":
        from data.images.folder import find_image_folder

        return find_image_folder(config, images)
    if is_import_path(config.name):
        from data.images.own import find_own_images

        return find_own_images(config, images)
    from data.images.tfds_images import find_tfds_images

    return find_tfds_images(config, images)


def _find_validation(
    labels: Sequence[Label], config: DataConfig, images: ImageConfig
) -> dict[str, Split]:
    """Find the images of each validation set that the config names, by its name."""
    if not config.validation_splits:
        return find_validation_folders(labels, config, images)
    from data.images.tfds_images import find_tfds_validation

    return find_tfds_validation(labels, config, images)
