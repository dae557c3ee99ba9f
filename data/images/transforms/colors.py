"""Random changes of an image's colours.

Source: the factors and the order of the jitter are torchvision's ColorJitter; blur and inversion as
Grill et al. 2020 (arXiv:2006.07733), appendix B.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

# Of the blur, in pixels.
_MIN_SIGMA, _MAX_SIGMA = 0.1, 2.0
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def jitter(
    image: Image.Image, strength: tuple[float, ...], random: np.random.Generator
) -> Image.Image:
    """Returns the image with another brightness, contrast, saturation and hue, in random order.

    Args:
        image: Of mode L or RGB.
        strength: Of the four; a factor is drawn from 1 ± strength, a hue from ± strength turns.
        random: What is drawn comes from here.
    """
    for which in random.permutation(4):
        amount = strength[which]
        if amount and which == 3:
            image = shift_hue(image, random.uniform(-amount, amount))
        elif amount:
            factor = random.uniform(max(0.0, 1 - amount), 1 + amount)
            image = _ENHANCERS[which](image).enhance(factor)
    return image


def shift_hue(image: Image.Image, turns: float) -> Image.Image:
    """Returns the image of mode RGB with all hues turned by so much of the circle."""
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(place + round(turns * 255)) % 256 for place in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def without_color(image: Image.Image) -> Image.Image:
    """Returns the image in grey, of the same mode."""
    return image.convert("L").convert(image.mode)


def blurred(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Returns the image blurred by a Gaussian of 0.1 to 2 pixels."""
    return image.filter(ImageFilter.GaussianBlur(random.uniform(_MIN_SIGMA, _MAX_SIGMA)))


def solarized(image: Image.Image) -> Image.Image:
    """Returns the image with the brighter half of its values inverted."""
    return ImageOps.solarize(image, 128)
