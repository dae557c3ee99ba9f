"""A corpus of images as rows of batches.

R: rows, S: pixels of a side, C: channels.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from data.config import DataConfig, make_cache
from data.examples import (
    EVALUATION,
    PAIR,
    TRAIN,
    Batch,
    BrokenExample,
    Corpus,
    Example,
    Examples,
    generator,
    stack,
)
from data.image_config import ImageConfig
from data.images.sources import ImageDataset, ImageSource, hold_out
from data.images.transforms.augment import augment, central
from data.images.transforms.mixing import draw_mix
from data.images.workers import Workers
from data.own import is_own
from data.shapes import batch_shapes

# What the key of a mask has beyond its row's.
_MASK = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImageCorpus(Corpus):
    """Images, and what is learnt of them."""


@dataclass(frozen=True, kw_only=True)
class ExampleRequest:
    """What a row of the train stream is made of.

    Attributes:
        element: Its number in the stream.
        seed: Of all that is random in it, together with the element's number.
        index: Of its image.
        other: The index of the image that is mixed in, which is that of element ^ 1; None: none.
    """

    element: int
    seed: int
    index: int
    other: int | None = None


class Images(Examples):
    """Images as rows; see `data.shapes` for their keys.

    Args:
        source: The images.
        data: The objective, and the size of the batch.
        images: What is done with them.
    """

    def __init__(self, source: ImageSource, data: DataConfig, images: ImageConfig):
        self._source, self._data, self._images = source, data, images
        self._split, self._workers = "", None
        self._shapes = batch_shapes(data, images)
        self._lost: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None}

    def __len__(self) -> int:
        return len(self._source)

    @property
    def row_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    def read_in(self, workers: Workers, split: str) -> None:
        """Has rows read by worker processes, to which this object is `split`."""
        self._workers, self._split = workers, split

    def example(self, index: int, key: tuple[int, ...]) -> Example:
        return self._row(index, key, augments=True)

    def __getitem__(self, index: int) -> Example:
        """Returns row `index` as evaluations see it: the middle of the image.

        Of image_contrast the views are random, as in training, but hang on `index` alone.
        """
        self._check(index)
        return self._row(index, (EVALUATION, index), augments=False)

    def train_batch(self, elements: Sequence[int], order: Callable[[int], int], seed: int) -> Batch:
        places = [self._place(element, order, seed) for element in elements]
        return self._read("train_rows", sorted(places, key=lambda p: p.element), elements)

    def evaluation_batch(self, indices: Sequence[int]) -> Batch:
        return self._read("evaluation_rows", sorted(indices), indices)

    def train_rows(self, places: Sequence[ExampleRequest]) -> Batch:
        """Returns the rows of the train stream that are made of these images."""
        seed = places[0].seed
        # Both of a pair are read for either.
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
        """Returns rows as evaluations see them."""
        return stack([self[index] for index in indices])

    def _read(self, method: str, arguments: Sequence[Any], wanted: Sequence[int]) -> Batch:
        """Returns what a method makes of the arguments, which are sorted, in the wanted order."""
        if self._workers is None:
            batch = getattr(self, method)(arguments)
        else:
            calls = self._workers.shares(arguments)
            parts = self._workers.map(self._split, method, calls)
            batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if list(wanted) == sorted(wanted):
            return batch
        places = np.argsort(np.argsort(np.array(wanted), kind="stable"))
        return {name: values[places] for name, values in batch.items()}

    def _place(self, element: int, order: Callable[[int], int], seed: int) -> ExampleRequest:
        other = order(self._number(element ^ 1)) if self._images.mixes else None
        index = order(self._number(element))
        return ExampleRequest(element=element, seed=seed, index=index, other=other)

    def _number(self, element: int) -> int:
        """Returns the number of the element's image among those that are drawn one after another.

        A batch has its images in rounds, so that no image is mixed with itself.
        """
        size, repeats = self._data.global_batch_size, self._images.repeats
        batch, row = divmod(element, size)
        num_images = -(-size // repeats)
        return batch * num_images + row % num_images

    def _row(self, index: int, key: tuple[int, ...], *, augments: bool) -> Example:
        try:
            image, label = self._source.read(index)
            pixels = self._pixels(image, key, augments=augments)
        except Exception as error:  # Of a broken file Pillow raises whatever its decoder does.
            return self._lose(index, error)
        row: Example = {"images": pixels, "weights": np.array(1, np.float32)}
        if self._data.objective == "image_reconstruction":
            row["mask_seeds"] = np.array(generator((*key, _MASK)).integers(2**32), np.uint32)
        if self._data.objective == "image_classification":
            row["targets"] = np.array(label, np.int32)
            if self._images.mixes:
                row["other_targets"] = row["targets"]
                row["target_shares"] = np.array(1, np.float32)
        return row

    def _lose(self, index: int, error: Exception) -> Example:
        """Returns a row of no weight in place of an image that broke since it was checked.

        Raises:
            BrokenExample: `images.on_broken` does not skip it.
        """
        what = f"{self._source.place(index)} cannot be read: {type(error).__name__}: {error}"
        if self._images.on_broken == "refuse":
            raise BrokenExample(
                f"{what}; mend it and start again, or set images.on_broken='skip' in a new run"
            ) from error
        if index not in self._lost:
            self._lost.add(index)
            logger.warning("%s; left out (%d so far in this process)", what, len(self._lost))
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}

    def _pixels(self, image: Image.Image, key: tuple[int, ...], *, augments: bool) -> np.ndarray:
        """Returns uint8[S, S, C], or of image_contrast uint8[2, S, S, C]."""
        config, random = self._images, generator(key)
        if self._data.objective == "image_contrast":
            image.load()  # All of it: each view may need another part.
            return np.stack([augment(image, config, random, view) for view in (0, 1)])
        return augment(image, config, random) if augments else central(image, config)

    def _mixed(self, rows: dict[int, Example], place: ExampleRequest) -> Example:
        row, other = rows[place.element], rows[place.element ^ 1]
        if not (row["weights"] and other["weights"]):
            return row
        mix = draw_mix(self._images, generator((PAIR, place.seed, place.element // 2)))
        return {
            **row,
            "images": mix(row["images"], other["images"]),
            "other_targets": other["targets"],
            "target_shares": np.array(mix.share, np.float32),
        }


def load_images(config: DataConfig, images: ImageConfig) -> ImageCorpus:
    """Returns the corpus of images, found and checked, prepared on first use.

    Raises:
        ValueError: The data set is unknown, broken or unfit for the objective, or has too few
            images for one batch.
        FileNotFoundError: A folder is not there.
    """
    make_cache(config)
    found = hold_out(_find(config, images), config, images)
    assert found.validation is not None
    num_images = len(found.train.source)
    needed = -(-config.global_batch_size // images.repeats)
    if num_images < needed:
        raise ValueError(
            f"data.global_batch_size={config.global_batch_size} with images.repeats="
            f"{images.repeats} needs {needed} training images, but "
            f"data.name={config.name!r} has {num_images} with data.validation_fraction="
            f"{config.validation_fraction} and images.train_fraction={images.train_fraction}; "
            "choose a smaller batch, or add images"
        )
    train = Images(found.train.source, config, images)
    validation = Images(found.validation.source, config, images)
    if images.num_workers:
        targets = {"train": train, "validation": validation}
        workers = Workers(images.num_workers, targets, f"images.num_workers={images.num_workers}")
        for split, rows in targets.items():
            rows.read_in(workers, split)
    return ImageCorpus(
        train=train, validation=validation, fingerprint=found.key, labels=found.classes
    )


def _find(config: DataConfig, images: ImageConfig) -> ImageDataset:
    if config.name == "image_folder":
        from data.images.folder import find_image_folder

        return find_image_folder(config, images)
    if is_own(config.name):
        from data.images.own import find_own_images

        return find_own_images(config, images)
    from data.images.tfds_images import find_tfds_images

    return find_tfds_images(config, images)
