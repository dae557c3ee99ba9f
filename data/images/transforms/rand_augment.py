"""RandAugment: apply a few random operations out of fifteen, at a common mean magnitude.

This is timm's 'rand-mM-mstd0.5-inc1': each operation is applied with probability 0.5, its magnitude
is drawn from a normal distribution, and every operation is scaled such that a larger magnitude
changes the image more.

Source: Cubuk et al. 2019 (arXiv:1909.13719).
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

# The largest magnitude; the smallest is 0.
_MAX_MAGNITUDE = 10.0
_MAGNITUDE_STDDEV = 0.5
_PROBABILITY = 0.5
# The color of the area that a shifted or rotated image does not cover: the mean color of ImageNet.
_FILL = {"RGB": (124, 116, 104), "L": 128}

Operation = Callable[[Image.Image, float, float], Image.Image]


def rand_augment(
    image: Image.Image, num: int, magnitude: float, random: np.random.Generator
) -> Image.Image:
    """Apply random operations to an image.

    Args:
        image: image of mode L or RGB.
        num: number of operations to draw, with replacement; each is then applied with
            probability 0.5.
        magnitude: mean magnitude of the operations, 0 to 10.
    """
    names = list(OPERATIONS)
    for number in random.integers(len(names), size=num):
        if random.random() < _PROBABILITY:
            drawn = magnitude + _MAGNITUDE_STDDEV * random.standard_normal()
            strength = min(max(drawn, 0.0), _MAX_MAGNITUDE) / _MAX_MAGNITUDE
            sign = 1.0 if random.random() < 0.5 else -1.0
            image = OPERATIONS[names[number]](image, strength, sign)
    return image


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        resample=Image.Resampling.BICUBIC,
        fillcolor=_FILL[image.mode],
    )


def _rotate(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return image.rotate(
        sign * 30 * strength, resample=Image.Resampling.BICUBIC, fillcolor=_FILL[image.mode]
    )


def _solarize_add(image: Image.Image, strength: float, sign: float) -> Image.Image:
    del sign
    added = int(110 * strength)
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _posterize(image: Image.Image, strength: float, sign: float) -> Image.Image:
    del sign
    # Drop 4 to 8 of the 8 bits. Pillow's own posterize cannot drop all of them.
    num_dropped = 4 + int(4 * strength)
    table = [value >> num_dropped << num_dropped for value in range(256)]
    return image.point(table * len(image.getbands()))


def _enhance(kind: type) -> Operation:
    return lambda image, strength, sign: kind(image).enhance(max(0.1, 1 + sign * 0.9 * strength))


#: Name -> operation, a function (image, strength from 0 to 1, sign +1 or -1) -> image.
OPERATIONS: dict[str, Operation] = {
    "auto_contrast": lambda image, strength, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, sign: ImageOps.equalize(image),
    "invert": lambda image, strength, sign: ImageOps.invert(image),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": lambda image, strength, sign: ImageOps.solarize(image, 256 - int(256 * strength)),
    "solarize_add": _solarize_add,
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, strength, sign: _affine(image, 1, sign * 0.3 * strength, 0, 0, 1, 0),
    "shear_y": lambda image, strength, sign: _affine(image, 1, 0, 0, sign * 0.3 * strength, 1, 0),
    "translate_x": lambda image, strength, sign: _affine(
        image, 1, 0, sign * 0.45 * strength * image.width, 0, 1, 0
    ),
    "translate_y": lambda image, strength, sign: _affine(
        image, 1, 0, 0, 0, 1, sign * 0.45 * strength * image.height
    ),
}
