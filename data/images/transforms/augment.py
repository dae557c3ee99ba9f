"""Preprocessing of images: random augmentation in training, a central crop in evaluations."""

import math

import numpy as np
from PIL import Image

from data.image_config import ImageConfig
from data.images.transforms.colors import blur, jitter, solarize, without_color
from data.images.transforms.crops import central_crop, crop, random_box
from data.images.transforms.rand_augment import rand_augment

# Random erasing: range of the rectangle's fraction of the area, range of its height ÷ width, and
# number of attempts to draw a rectangle that fits.
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_RATIO = (0.3, 1 / 0.3)
_NUM_TRIES = 10


def augment(
    image: Image.Image, config: ImageConfig, random: np.random.Generator, view: int = 0
) -> np.ndarray:
    """Crop and augment an image at random, as in training, to uint8[size, size, channels].

    The operations are applied in this order: crop, flip, color jitter, grayscale, blur, solarize,
    RandAugment, erasing.

    Args:
        image: image, preferably not decoded yet, so that only the needed pixels are decoded.
        view: 0 or 1, the view of a pair; selects one of the two probabilities of `blur` and
            `solarize`.
    """
    width, height = image.size
    box = (0.0, 0.0, float(width), float(height))
    if tuple(config.crop_scale) != (1, 1):
        box = random_box(width, height, config.crop_scale, config.crop_ratio, random)
    changed = crop(image, box, config.size, config.channels)
    if config.flip and random.random() < 0.5:
        changed = changed.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if any(config.jitter) and random.random() < config.jitter_probability:
        changed = jitter(changed, config.jitter, random)
    if config.grayscale and random.random() < config.grayscale:
        changed = without_color(changed)
    if config.blur[view] and random.random() < config.blur[view]:
        changed = blur(changed, random)
    if config.solarize[view] and random.random() < config.solarize[view]:
        changed = solarize(changed)
    if config.randaugment_num:
        magnitude = config.randaugment_magnitude
        changed = rand_augment(changed, config.randaugment_num, magnitude, random)
    pixels = to_array(changed)
    if config.erasing and random.random() < config.erasing:
        pixels = erase(pixels, random)
    return pixels


def central(image: Image.Image, config: ImageConfig) -> np.ndarray:
    """Return uint8[size, size, channels]: the central crop of an image, as in evaluations."""
    return to_array(central_crop(image, config.size, config.channels, config.eval_crop))


def to_array(image: Image.Image) -> np.ndarray:
    """Return uint8[height, width, channels] of an image of mode L or RGB."""
    pixels = np.array(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def erase(pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Replace a random rectangle by noise, in place.

    Ten rectangles are tried; if none fits into the image, the image is not changed.

    Args:
        pixels: uint8[height, width, channels]; modified in place.

    Source: Zhong et al. 2017 (arXiv:1708.04896), algorithm 1, with random values (RE-R). The
        largest area is 1/3, as in timm, instead of 0.4.
    """
    height, width, channels = pixels.shape
    low, high = (math.log(ratio) for ratio in _ERASED_RATIO)
    for _ in range(_NUM_TRIES):
        area = height * width * random.uniform(_ERASED_AREA[0], _ERASED_AREA[1])
        ratio = math.exp(random.uniform(low, high))
        h = round(math.sqrt(area * ratio))
        w = round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top = int(random.integers(height - h + 1))
            left = int(random.integers(width - w + 1))
            noise = random.integers(256, size=(h, w, channels), dtype=np.uint8)
            pixels[top : top + h, left : left + w] = noise
            break
    return pixels
