"""Small image data sets and configs that the data tests share."""

import io
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from data.config import DataConfig
from data.corpus import load_corpus
from data.examples import Corpus, Examples
from data.image_config import ImageConfig

#: Number of training images that `plain_images` returns.
NUM_PLAIN = 60


def plain(value: int, *, width: int = 12, height: int = 10) -> np.ndarray:
    """Return a gray image of a single value, which identifies it even after resizing."""
    return np.full((height, width, 1), value, np.uint8)


def plain_images():
    """Return plain images of the values 1, 2, ... with cyclic labels, like a user's function."""
    pairs = [(plain(value), value % 3) for value in range(1, NUM_PLAIN + 14)]
    return {"train": pairs[:NUM_PLAIN], "validation": pairs[NUM_PLAIN:]}


def textured_images():
    """Return images of noise, in which every change is visible, of several shapes."""
    rng = np.random.default_rng(0)
    sizes = itertools.product((20, 31, 44), (24, 35))
    shapes = [(*size, 3) for size in sizes for _ in range(8)]
    noise = [rng.integers(256, size=shape, dtype=np.uint8) for shape in shapes]
    pairs = [(encoded(image, "png"), f"class {i % 4}") for i, image in enumerate(noise)]
    return {"train": pairs[:37], "validation": pairs[37:]}


def uneven_images():
    """Return 16 training and 37 validation images of noise, 8 × 8 pixels, with 7 labels."""
    noise = np.random.default_rng(1).integers(256, size=(53, 8, 8, 1), dtype=np.uint8)
    pairs = [(image, int(image[0, 0, 0]) % 7 if i > 6 else i) for i, image in enumerate(noise)]
    return {"train": pairs[:16], "validation": pairs[16:]}


def lacking_classes():
    validation = [(plain(3), "a"), (plain(4), "c")]
    return {"train": [(plain(1), "a"), (plain(2), "b")], "validation": validation}


def wrong_labels():
    wrong = [(plain(2), 1.5), (plain(3), True)]
    return {"train": [(plain(1), 0), *wrong, (plain(4), 1)], "validation": []}


def negative_labels():
    return {"train": [(plain(1), 0), (plain(2), -1)], "validation": []}


def single_class():
    return {"train": [(plain(1), 0), (plain(2), 0)], "validation": []}


def no_pairs():
    return {"train": [plain(1)], "validation": []}


def floats():
    return {"train": [(plain(1), 0), (plain(2) / 255, 1)], "validation": []}


def one_broken():
    good = [(plain(value), value % 2) for value in range(9)]
    broken = [(b"no image", 1), (plain(77), -1)]
    return {
        "train": [*good[:4], *broken, *good[4:]],
        "validation": [*good[:2], (plain(9), 2)],
    }


class Failing:
    """A sequence of images, one of which raises an error."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise KeyError(f"no image {index}")
        return plain(index), index % 2


def failing():
    return {"train": Failing(), "validation": []}


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    """Encode an image in this file format."""
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, kind)
    return stream.getvalue()


def write_image(path: Path, value: int, **shape: int) -> None:
    """Write a plain image, and create the folders of its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(plain(value, **shape), path.suffix[1:].lower().replace("jpg", "jpeg")))


def write_classes(
    root: Path, names: Iterable[str] = "ab", num_images: int = 8, first: int = 0
) -> None:
    """Write a folder of plain images per class; values count up from `first` over all classes."""
    values = itertools.count(first)
    for name in names:
        for i in range(num_images):
            write_image(root / name / f"{i}.png", next(values))


def image_config(directory: Path, **changes) -> DataConfig:
    """Return a config of `plain_images`."""
    fields = {
        "name": "tests.data.images.pictures:plain_images",
        "objective": "image_classification",
        "global_batch_size": 6,
        "cache_dir": str(directory / "cache"),
    }
    return DataConfig(**{**fields, **changes})


def load(directory: Path, images: ImageConfig | None = None, **changes) -> Corpus:
    """Return the corpus of a config."""
    return load_corpus(image_config(directory, **changes), images)


def folder(directory: Path, *roots: Path, images: ImageConfig | None = None, **changes) -> Corpus:
    """Return the corpus of some folders."""
    fields = {"name": "image_folder", "paths": tuple(map(str, roots)), "global_batch_size": 4}
    return load(directory, images, **{**fields, **changes})


def values(examples: Examples) -> list[int]:
    """Return the value of each of these plain images."""
    return [int(examples[i]["images"].flat[0]) for i in range(len(examples))]


def targets(examples: Examples) -> list[int]:
    return [int(examples[i]["targets"]) for i in range(len(examples))]


def values_of(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Return the value of each image in a batch of plain images."""
    values = batch["images"].reshape(len(batch["images"]), -1)
    assert (values == values[:, :1]).all()
    return values[:, 0]
