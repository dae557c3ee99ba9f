"""The config section `images`: crops, augmentation, mixing and selection of images."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from data.checks import require
from data.config import DataConfig
from fields.field import field
from fields.section import Section

# Fields that only some objectives read -> these objectives.
_READ_WITH = {
    "blur": ("image_contrast",),
    "solarize": ("image_contrast",),
    "mixup": ("image_classification",),
    "cutmix": ("image_classification",),
    # Not image_contrast, which would treat the views of one repeated image as different images.
    "repeats": ("image_classification", "image_reconstruction"),
}


def _fraction(default: float, doc: str) -> Any:
    """Declare a fraction of images."""
    return field(default, doc, ge=0, le=1, remedy="0 is none, 1 is all")


def _of_both_views(doc: str, remedy: str) -> Any:
    """Declare a fraction of the first views and one of the second views."""
    return field((0.0, 0.0), doc, length=2, ge=0, le=1, remedy=remedy)


def _alpha(doc: str) -> Any:
    """Declare alpha of Mixup or CutMix."""
    return field(0.0, doc, ge=0, remedy="choose for example 1.0, or 0 for none")


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Section, section="images"):
    """Preprocessing, augmentation and selection of images, for `data.objective=image_...`.

    See docs/data.md.
    """

    size: int = field(8, "Height and width of the model's input, in pixels.", ge=1)
    channels: int = field(
        1,
        "3: red, green, blue; 1: gray. Images of another mode are converted.",
        choices=(3, 1),
        remedy="choose 3 (color) or 1 (gray)",
    )
    crop_scale: tuple[float, ...] = field(
        (1.0, 1.0),
        "Minimum and maximum fraction of the area that a random crop keeps. `1,1` resizes images "
        "without cropping them.",
        length=2,
        gt=0,
        le=1,
        remedy="fractions of the area, the smaller first; choose for example (0.08, 1.0)",
    )
    crop_ratio: tuple[float, ...] = field(
        (3 / 4, 4 / 3),
        "Minimum and maximum width ÷ height of a random crop.",
        length=2,
        gt=0,
        remedy="the smaller first; choose for example (0.75, 1.333)",
    )
    flip: bool = field(False, "Mirror an image horizontally with probability 0.5.")
    randaugment_num: int = field(
        0, "RandAugment operations per image, each applied with probability 0.5; 0: none.", ge=0
    )
    randaugment_magnitude: float = field(
        9.0,
        "Mean magnitude of the RandAugment operations.",
        ge=0,
        le=10,
        remedy="choose for example 9, or disable RandAugment with images.randaugment_num=0",
    )
    jitter: tuple[float, ...] = field(
        (0.0, 0.0, 0.0, 0.0),
        "Strength of the color jitter: brightness, contrast, saturation, hue; 0: none. The hue is "
        "at most 0.5.",
        length=4,
        ge=0,
        remedy="choose for example (0.4, 0.4, 0.2, 0.1)",
    )
    jitter_probability: float = _fraction(0.8, "Fraction of images to jitter.")
    grayscale: float = _fraction(0.0, "Fraction of images to convert to gray.")
    blur: tuple[float, ...] = _of_both_views(
        "For `image_contrast`: fraction of first views and of second views to blur.",
        "choose for example (1.0, 0.1)",
    )
    solarize: tuple[float, ...] = _of_both_views(
        "For `image_contrast`: fraction of first views and of second views to solarize, which "
        "inverts bright pixels.",
        "choose for example (0.0, 0.2)",
    )
    erasing: float = _fraction(0.0, "Fraction of images in which a rectangle is replaced by noise.")
    mixup: float = _alpha(
        "For `image_classification`: alpha of Mixup, whose shares are drawn from "
        "Beta(alpha, alpha); 0: none."
    )
    cutmix: float = _alpha("For `image_classification`: alpha of CutMix; 0: none.")
    mixing_probability: float = _fraction(1.0, "Fraction of image pairs to mix.")
    cutmix_share: float = _fraction(
        0.5, "Fraction of mixed pairs that use CutMix, if Mixup is enabled too."
    )
    repeats: int = field(
        1, "How many times an image occurs in a batch, augmented differently each time.", ge=1
    )
    eval_crop: float = field(
        1.0,
        "In evaluations: side of the central crop ÷ shorter side of the resized image, for images "
        "of any size. 1 keeps all of the shorter side.",
        gt=0,
        le=1,
        remedy="choose for example 1.0",
    )
    train_fraction: float = field(
        1.0,
        "Fraction of the training images to use, the same fraction of each class.",
        gt=0,
        le=1,
        remedy="choose for example 1.0",
    )
    on_broken: str = field(
        "refuse",
        "What to do about unreadable images, invalid labels, and classes without images. `refuse`: "
        "do not start. `skip`: skip them.",
        choices=("refuse", "skip"),
    )
    num_workers: int = field(
        0,
        "Worker processes that read images, per process of the run. 0: read them in the threads of "
        "`data.num_threads`.",
        ge=0,
        le=1024,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_order("crop_scale", "(0.08, 1.0)")
        self._check_order("crop_ratio", "(0.75, 1.333)")
        require(
            self.jitter[3] <= 0.5,
            f"images.jitter={self.jitter!r}: its last number, the hue, must be at most 0.5; choose "
            "for example (0.4, 0.4, 0.2, 0.1)",
        )
        has_colors = self.grayscale or any(self.jitter[2:])
        require(
            self.channels == 3 or not has_colors,
            f"images.grayscale={self.grayscale!r} and the last two numbers of images.jitter="
            f"{self.jitter!r} change colors, but images.channels=1 has none; set them to 0",
        )

    def _check_order(self, name: str, example: str) -> None:
        value = getattr(self, name)
        require(
            value[0] <= value[1],
            f"images.{name}={value!r} must have the smaller number first; choose for example "
            f"{example}",
        )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, by Mixup or CutMix."""
        return self.mixing_probability > 0 and (self.mixup > 0 or self.cutmix > 0)


def check_images(data: DataConfig, images: ImageConfig) -> None:
    """Check that the config sections `data` and `images` are compatible.

    Raises:
        ValueError: A field of `images` is set that the objective does not read, or mixing or
            repetition is impossible with this batch size.
    """
    if not data.reads_images:
        defaults = ImageConfig()
        for each in dataclasses.fields(ImageConfig):
            value = getattr(images, each.name)
            default = getattr(defaults, each.name)
            require(
                value == default,
                f"images.{each.name}={value!r} is read only for images, but data.objective="
                f"{data.objective!r} reads texts; set images.{each.name}={default!r}, or "
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
    rampup = data.rampup_batch_size
    require(
        not images.mixes or not any(number % 2 for number in rampup[:2]),
        f"images.mixup={images.mixup} and images.cutmix={images.cutmix} mix the images of a batch "
        f"in pairs, but data.rampup_batch_size={rampup!r} leads to odd sizes; choose an even START "
        "and INCREMENT",
    )
    require(
        images.repeats == 1 or not rampup,
        f"images.repeats={images.repeats} counts the images of batches of the same size, but "
        f"data.rampup_batch_size={rampup!r}; set images.repeats=1, or data.rampup_batch_size=()",
    )
    require(
        images.repeats == 1 or 2 * images.repeats <= size,
        f"images.repeats={images.repeats} leaves fewer than two different images in a batch of "
        f"data.global_batch_size={size}; repeat them at most {max(size // 2, 1)} times",
    )
