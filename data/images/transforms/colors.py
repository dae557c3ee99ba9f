"""Random changes of colors: jitter, grayscale, blur and solarization.

Source: the factors and the order of the jitter follow torchvision's ColorJitter; blur and
solarization follow Grill et al. 2020 (arXiv:2006.07733), appendix B.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

# Range of the standard deviation of the Gaussian blur, in pixels.
_MIN_SIGMA = 0.1
_MAX_SIGMA = 2.0
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def jitter(
    image: Image.Image, strength: tuple[float, ...], random: np.random.Generator
) -> Image.Image:
    """Change brightness, contrast, saturation and hue at random, in random order.

    Args:
        image: image of mode L or RGB.
        strength: strengths of the four changes, in this order; 0 for no change. A factor is
            drawn from 1 ± strength, but not below 0, and a rotation of the hue from ± strength
            turns.
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
    """Rotate the hues of an RGB image by a (possibly negative) fraction of the color circle."""
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(place + round(turns * 255)) % 256 for place in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def without_color(image: Image.Image) -> Image.Image:
    """Return the image in gray, in the same mode."""
    return image.convert("L").convert(image.mode)


def blur(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Blur an image with a Gaussian whose standard deviation is 0.1 to 2 pixels."""
    return image.filter(ImageFilter.GaussianBlur(random.uniform(_MIN_SIGMA, _MAX_SIGMA)))


def solarize(image: Image.Image) -> Image.Image:
    """Invert the pixel values from 128 on."""
    return ImageOps.solarize(image, 128)
