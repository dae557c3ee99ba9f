"""An image as a model sees it in training, and as it sees it in evaluations."""

import math

import numpy as np
from PIL import Image

from data.image_config import ImageConfig
from data.images.transforms.colors import blurred, jitter, solarized, without_color
from data.images.transforms.crops import central_crop, crop, random_box
from data.images.transforms.rand_augment import rand_augment

# Of an erased rectangle: part of the area, height ÷ width, and how many are tried.
_ERASED_AREA, _ERASED_RATIO, _NUM_TRIES = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


def augment(
    image: Image.Image, config: ImageConfig, random: np.random.Generator, view: int = 0
) -> np.ndarray:
    """Returns uint8[size, size, channels]: a random crop of the image, changed at random.

    Args:
        image: Not decoded yet, so that only the pixels needed are.
        config: What is done.
        random: What is drawn comes from here.
        view: 0 or 1, of a pair: which of the probabilities of `blur` and `solarize` counts.
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
        changed = blurred(changed, random)
    if config.solarize[view] and random.random() < config.solarize[view]:
        changed = solarized(changed)
    if config.randaugment_num:
        magnitude = config.randaugment_magnitude
        changed = rand_augment(changed, config.randaugment_num, magnitude, random)
    pixels = to_array(changed)
    if config.erasing and random.random() < config.erasing:
        pixels = erase(pixels, random)
    return pixels


def central(image: Image.Image, config: ImageConfig) -> np.ndarray:
    """Returns uint8[size, size, channels]: the middle of the image, with nothing random in it."""
    return to_array(central_crop(image, config.size, config.channels, config.eval_crop))


def to_array(image: Image.Image) -> np.ndarray:
    """Returns uint8[height, width, channels] of an image of mode L or RGB."""
    pixels = np.array(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def erase(pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns the pixels with a rectangle of noise in them, if one of ten fits.

    Source: Zhong et al. 2017 (arXiv:1708.04896), algorithm 1, with random values (RE-R); the
        largest area is that of timm, 1/3 instead of 0.4.
    """
    height, width, channels = pixels.shape
    low, high = (math.log(ratio) for ratio in _ERASED_RATIO)
    for _ in range(_NUM_TRIES):
        area = height * width * random.uniform(_ERASED_AREA[0], _ERASED_AREA[1])
        ratio = math.exp(random.uniform(low, high))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top, left = int(random.integers(height - h + 1)), int(random.integers(width - w + 1))
            noise = random.integers(256, size=(h, w, channels), dtype=np.uint8)
            pixels[top : top + h, left : left + w] = noise
            break
    return pixels
