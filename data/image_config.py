"""The config section `images`: crops, augmentation, mixing and selection of images."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.checks import is_int, is_number, require
from data.config import DataConfig

# Fields that only some objectives read -> these objectives.
_READ_WITH = {
    "blur": ("image_contrast",),
    "solarize": ("image_contrast",),
    "mixup": ("image_classification",),
    "cutmix": ("image_classification",),
    # Not image_contrast, which would treat the views of one repeated image as different images.
    "repeats": ("image_classification", "image_reconstruction"),
}
_PROBABILITIES = (
    "grayscale",
    "erasing",
    "jitter_probability",
    "mixing_probability",
    "cutmix_share",
)
_MAX_MAGNITUDE = 10


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Preprocessing, augmentation and selection of the images of a data set.

    Raises:
        ValueError: A field is out of range; the message names the key, the value, the rule and the
            remedy.
    """

    # Height and width, in pixels, of the images that the model receives.
    size: int = 8
    # 3 (red, green, blue) or 1 (gray). Images of another mode are converted.
    channels: int = 1
    # Minimum and maximum fraction of the area that a random crop keeps; (1, 1) resizes images
    # without cropping them.
    crop_scale: tuple[float, ...] = (1.0, 1.0)
    # Minimum and maximum width ÷ height of a random crop.
    crop_ratio: tuple[float, ...] = (3 / 4, 4 / 3)
    # Mirror half of the images horizontally.
    flip: bool = False
    # Number of RandAugment operations per image, each applied with probability 0.5; 0 for none.
    randaugment_num: int = 0
    # Mean magnitude of the RandAugment operations, 0 to 10.
    randaugment_magnitude: float = 9.0
    # Strength of the color jitter: brightness, contrast, saturation, hue; 0 for none.
    jitter: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    # The fraction of images that is jittered.
    jitter_probability: float = 0.8
    # The fraction of images that is converted to gray.
    grayscale: float = 0.0
    # The fraction of first views and of second views that is blurred.
    blur: tuple[float, ...] = (0.0, 0.0)
    # The fraction of first views and of second views that is solarized: bright pixels are inverted.
    solarize: tuple[float, ...] = (0.0, 0.0)
    # The fraction of images in which a rectangle is replaced by noise.
    erasing: float = 0.0
    # alpha of Mixup, whose shares are drawn from Beta(alpha, alpha); 0 for no Mixup.
    mixup: float = 0.0
    # alpha of CutMix; 0 for no CutMix.
    cutmix: float = 0.0
    # The fraction of image pairs that is mixed.
    mixing_probability: float = 1.0
    # The fraction of mixed pairs that uses CutMix, if Mixup is enabled too.
    cutmix_share: float = 0.5
    # How many times an image occurs in a batch, augmented differently each time.
    repeats: int = 1
    # Side of the central crop in evaluations ÷ shorter side of the resized image, for images of any
    # size; 1 keeps all of the shorter side.
    eval_crop: float = 1.0
    # The fraction of the training images that is used, the same fraction of each class.
    train_fraction: float = 1.0
    # What to do about unreadable images, invalid labels, and classes without images: 'refuse' to
    # start, or 'skip' them.
    on_broken: str = "refuse"
    # Number of worker processes that read images, per process of the run; 0 reads them in the
    # threads of data.num_threads.
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
            f"images.channels={self.channels!r} must be 3 (color) or 1 (gray); choose one of them",
        )
        self._check_crops()
        self._check_colors()
        for key in _PROBABILITIES:
            _require_fraction(f"images.{key}", getattr(self, key))
        for key in ("mixup", "cutmix"):
            value = getattr(self, key)
            require(
                is_number(value) and 0 <= value < math.inf,
                f"images.{key}={value!r} must be a finite number of at least 0; "
                "choose for example 1.0, or 0 for none",
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
            f"images.crop_scale={self.crop_scale!r} must be two fractions of the area, more than 0 "
            "and at most 1, the smaller first; choose for example (0.08, 1.0)",
        )
        low, high = self.crop_ratio
        require(
            0 < low <= high < math.inf,
            f"images.crop_ratio={self.crop_ratio!r} must be two positive ratios, the smaller "
            "first; choose for example (0.75, 1.333)",
        )

    def _check_colors(self) -> None:
        require(
            is_number(self.randaugment_magnitude)
            and 0 <= self.randaugment_magnitude <= _MAX_MAGNITUDE,
            f"images.randaugment_magnitude={self.randaugment_magnitude!r} must be a number from 0 "
            f"to {_MAX_MAGNITUDE}; choose for example 9, or disable RandAugment with "
            "images.randaugment_num=0",
        )
        _require_numbers("images.jitter", self.jitter, 4, "(0.4, 0.4, 0.2, 0.1)")
        require(
            min(self.jitter) >= 0 and self.jitter[3] <= 0.5,
            f"images.jitter={self.jitter!r} must not be negative, and its last number, the hue, "
            "must be at most 0.5; choose for example (0.4, 0.4, 0.2, 0.1)",
        )
        for key, example in (("blur", "(1.0, 0.1)"), ("solarize", "(0.0, 0.2)")):
            value = getattr(self, key)
            _require_numbers(f"images.{key}", value, 2, example)
            for part in value:
                _require_fraction(f"images.{key}", part)
        has_colors = self.grayscale or any(self.jitter[2:])
        require(
            self.channels == 3 or not has_colors,
            f"images.grayscale={self.grayscale!r} and the last two numbers of images.jitter="
            f"{self.jitter!r} change colors, but images.channels=1 has none; set them to 0",
        )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, by Mixup or CutMix."""
        return self.mixing_probability > 0 and (self.mixup > 0 or self.cutmix > 0)


def check_images(data: DataConfig, images: ImageConfig) -> None:
    """Check that the config sections `data` and `images` are compatible.

    Args:
        data: The config section `data`.
        images: The config section `images`.

    Raises:
        ValueError: A field of `images` is set that the objective does not read, or mixing or
            repetition is impossible with this batch size.
    """
    if not data.reads_images:
        defaults = ImageConfig()
        for field in dataclasses.fields(ImageConfig):
            value = getattr(images, field.name)
            default = getattr(defaults, field.name)
            require(
                value == default,
                f"images.{field.name}={value!r} is read only for images, but data.objective="
                f"{data.objective!r} reads texts; set images.{field.name}={default!r}, or "
                "data.objective='image_classification'",
            )
        return
    for key, objectives in _READ_WITH.items():
        value = getattr(images, key)
        default = getattr(ImageConfig, key)
        require(
            value == default or data.objective in objectives,
            f"images.{key}={value!r} is read only with data.objective={objectives[0]!r}, but it is "
            f"{data.objective!r}; set images.{key}={default!r}",
        )
    size = data.global_batch_size
    require(
        not images.mixes or size % 2 == 0,
        f"images.mixup={images.mixup} and images.cutmix={images.cutmix} mix the images of a batch "
        f"in pairs, but data.global_batch_size={size} is odd; choose an even size such as "
        f"{size + 1}",
    )
    require(
        images.repeats == 1 or 2 * images.repeats <= size,
        f"images.repeats={images.repeats} leaves fewer than two different images in a batch of "
        f"data.global_batch_size={size}; repeat them at most {max(size // 2, 1)} times",
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
        f"{name}={value!r} must be a fraction from 0 (none) to 1 (all)",
    )
