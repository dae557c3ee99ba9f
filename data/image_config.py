"""How images are cropped, changed and chosen: the config section `images`."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.checks import is_int, is_number, require
from data.config import DataConfig

# The objectives that a field is for, where it is not for all of them.
_READ_WITH = {
    "blur": ("image_contrast",),
    "solarize": ("image_contrast",),
    "mixup": ("image_classification",),
    "cutmix": ("image_classification",),
    # Views of one image would be compared as if of two.
    "repeats": ("image_classification", "image_reconstruction"),
}
_PROBABILITIES = (
    *("grayscale", "erasing", "jitter_probability", "mixing_probability", "cutmix_share"),
)
_MAX_MAGNITUDE = 10


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What a model sees of the images of a data set.

    Raises:
        ValueError: A field is out of range; the message names key, value, rule and remedy.
    """

    # Pixels of a side, of what the model gets.
    size: int = 8
    # 3: red, green, blue; 1: grey. Images of another kind are converted.
    channels: int = 1
    # Part of the area that a random crop keeps, at least and at most; (1, 1): images are resized,
    # not cropped.
    crop_scale: tuple[float, ...] = (1.0, 1.0)
    # Width ÷ height of a random crop, at least and at most.
    crop_ratio: tuple[float, ...] = (3 / 4, 4 / 3)
    # Mirror half of the images.
    flip: bool = False
    # RandAugment's changes of an image, each done with probability 0.5; 0: none.
    randaugment_num: int = 0
    # How strong they are, on average, 0 to 10.
    randaugment_magnitude: float = 9.0
    # Strength of the colour jitter: brightness, contrast, saturation, hue; 0: none.
    jitter: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    # The part of the images that is jittered.
    jitter_probability: float = 0.8
    # The part of the images that loses its colour.
    grayscale: float = 0.0
    # The part of the first and of the second views that is blurred.
    blur: tuple[float, ...] = (0.0, 0.0)
    # The part of the first and of the second views whose bright pixels are inverted.
    solarize: tuple[float, ...] = (0.0, 0.0)
    # The part of the images that has a rectangle of noise in it.
    erasing: float = 0.0
    # alpha of Mixup, whose shares come from Beta(alpha, alpha); 0: none.
    mixup: float = 0.0
    # alpha of CutMix; 0: none.
    cutmix: float = 0.0
    # The part of the pairs of images that is mixed.
    mixing_probability: float = 1.0
    # The part of the mixed pairs that gets CutMix, where Mixup is on too.
    cutmix_share: float = 0.5
    # How often an image is in a batch, each time changed otherwise; 1: once.
    repeats: int = 1
    # Side of the central crop of evaluations ÷ the shorter side of the resized image, whatever the
    # size; 1: all of the shorter side.
    eval_crop: float = 1.0
    # The part of the training images that is used, the same part of each class.
    train_fraction: float = 1.0
    # What becomes of images that cannot be read, of labels that are none, and of classes without
    # images: 'refuse' to start, or 'skip' them.
    on_broken: str = "refuse"
    # Processes, for each process of the run, that read images; 0: the threads of data.num_threads.
    num_workers: int = 0

    def __post_init__(self) -> None:
        for key, least in (("size", 1), ("repeats", 1), ("num_workers", 0), ("randaugment_num", 0)):
            value = getattr(self, key)
            require(
                is_int(value) and value >= least,
                f"images.{key}={value!r} must be a whole number of at least {least}",
            )
        require(
            self.channels in (1, 3),
            f"images.channels={self.channels!r} must be 3 (colour) or 1 (grey); choose one of them",
        )
        self._check_crops()
        self._check_colors()
        for key in _PROBABILITIES:
            _require_fraction(f"images.{key}", getattr(self, key))
        for key in ("mixup", "cutmix"):
            value = getattr(self, key)
            require(
                is_number(value) and 0 <= value < math.inf,
                f"images.{key}={value!r} must be a number above 0, or 0 for none; "
                "choose for example 1.0",
            )
        for key in ("eval_crop", "train_fraction"):
            value = getattr(self, key)
            require(
                is_number(value) and 0 < value <= 1,
                f"images.{key}={value!r} must be more than 0 and at most 1; choose for example 1.0",
            )
        require(
            self.on_broken in ("refuse", "skip"),
            f"images.on_broken={self.on_broken!r} is unknown; choose 'refuse' or 'skip'",
        )

    def _check_crops(self) -> None:
        _require_numbers("images.crop_scale", self.crop_scale, 2, "(0.08, 1.0)")
        _require_numbers("images.crop_ratio", self.crop_ratio, 2, "(0.75, 1.333)")
        low, high = self.crop_scale
        require(
            0 < low <= high <= 1,
            f"images.crop_scale={self.crop_scale!r} must be parts of the area, the smaller first, "
            "more than 0 and at most 1; choose for example (0.08, 1.0)",
        )
        low, high = self.crop_ratio
        require(
            0 < low <= high < math.inf,
            f"images.crop_ratio={self.crop_ratio!r} must be positive, the smaller first; "
            "choose for example (0.75, 1.333)",
        )

    def _check_colors(self) -> None:
        require(
            is_number(self.randaugment_magnitude)
            and 0 <= self.randaugment_magnitude <= _MAX_MAGNITUDE,
            f"images.randaugment_magnitude={self.randaugment_magnitude!r} must be a number from 0 "
            f"to {_MAX_MAGNITUDE}; choose for example 9, and randaugment_num=0 for none",
        )
        _require_numbers("images.jitter", self.jitter, 4, "(0.4, 0.4, 0.2, 0.1)")
        require(
            min(self.jitter) >= 0 and self.jitter[3] <= 0.5,
            f"images.jitter={self.jitter!r} must not be negative, and its last number, of the hue, "
            "at most 0.5; choose for example (0.4, 0.4, 0.2, 0.1)",
        )
        for key, example in (("blur", "(1.0, 0.1)"), ("solarize", "(0.0, 0.2)")):
            value = getattr(self, key)
            _require_numbers(f"images.{key}", value, 2, example)
            for part in value:
                _require_fraction(f"images.{key}", part)
        has_colors = self.grayscale or any(self.jitter[2:])
        require(
            self.channels == 3 or not has_colors,
            f"images.grayscale={self.grayscale!r} and the last two of images.jitter="
            f"{self.jitter!r} change colours, but images.channels=1 has none; set them to 0",
        )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.mixing_probability > 0 and (self.mixup > 0 or self.cutmix > 0)


def check_images(data: DataConfig, images: ImageConfig) -> None:
    """Checks that the two sections fit each other.

    Raises:
        ValueError: A field of `images` is set that the objective does not read, or mixing or
            repeating does not go with the size of the batch.
    """
    if not data.reads_images:
        defaults = ImageConfig()
        for field in dataclasses.fields(ImageConfig):
            value, default = getattr(images, field.name), getattr(defaults, field.name)
            require(
                value == default,
                f"images.{field.name}={value!r} is read only with images, but data.objective="
                f"{data.objective!r} reads texts; set images.{field.name}={default!r}, or "
                "data.objective='image_classification'",
            )
        return
    for key, objectives in _READ_WITH.items():
        value, default = getattr(images, key), getattr(ImageConfig, key)
        require(
            value == default or data.objective in objectives,
            f"images.{key}={value!r} is read only with data.objective={objectives[0]!r}, but it is "
            f"{data.objective!r}; set images.{key}={default!r}",
        )
    size = data.global_batch_size
    require(
        not images.mixes or size % 2 == 0,
        f"images.mixup={images.mixup} and images.cutmix={images.cutmix} mix the images of a batch "
        f"in pairs, but data.global_batch_size={size} is odd; choose {size + 1}",
    )
    require(
        images.repeats == 1 or 2 * images.repeats <= size,
        f"images.repeats={images.repeats} leaves fewer than two different images in a batch of "
        f"data.global_batch_size={size}; choose at most {max(size // 2, 1)}",
    )


def _require_numbers(name: str, value: Any, count: int, example: str) -> None:
    is_right = (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) == count
        and all(map(is_number, value))
    )
    require(is_right, f"{name}={value!r} must be {count} numbers; choose for example {example}")


def _require_fraction(name: str, value: object) -> None:
    require(
        is_number(value) and 0 <= value <= 1,
        f"{name}={value!r} must be a part of all, from 0 (none) to 1 (all)",
    )
