"""Mixup and CutMix: combine two images and their labels.

Source: Zhang et al. 2017 (arXiv:1710.09412), section 2; Yun et al. 2019 (arXiv:1905.04899),
section 3.
"""

import math
from dataclasses import dataclass

import numpy as np

from data.image_config import ImageConfig


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The way in which each image of a pair is combined with the other one.

    Attributes:
        share: weight of the image itself and of its label; the other image has 1 - share.
        box: CutMix: the (top, bottom, left, right) of the pixels taken from the other image. None
            for Mixup, which blends all pixels.
    """

    share: float
    box: tuple[int, int, int, int] | None = None

    def __call__(self, image: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Combine two images.

        Args:
            image: uint8[height, width, channels].
            other: uint8[height, width, channels].

        Returns:
            uint8[height, width, channels].
        """
        if self.share == 1:
            return image
        if self.box is None:
            share = np.float32(self.share)
            blended = share * image + (np.float32(1) - share) * other
            return np.rint(blended).astype(np.uint8)
        top, bottom, left, right = self.box
        mixed = image.copy()
        mixed[top:bottom, left:right] = other[top:bottom, left:right]
        return mixed


def draw_mix(config: ImageConfig, random: np.random.Generator) -> Mix:
    """Draw the mix of a pair of images; a share of 1 does not change them.

    Args:
        config: config section `images`; `mixup` or `cutmix` must be above 0.
    """
    if random.random() >= config.mixing_probability:
        return Mix(share=1.0)
    cuts = config.cutmix > 0 and (config.mixup == 0 or random.random() < config.cutmix_share)
    if not cuts:
        return Mix(share=float(random.beta(config.mixup, config.mixup)))
    share = random.beta(config.cutmix, config.cutmix)
    size = config.size
    side = int(size * math.sqrt(1 - share))
    y, x = (int(place) for place in random.integers(size, size=2))
    top = max(y - side // 2, 0)
    bottom = min(y - side // 2 + side, size)
    left = max(x - side // 2, 0)
    right = min(x - side // 2 + side, size)
    # The edge of the image may have cut off a part of the box, so the share is computed from the
    # pixels that are actually replaced.
    return Mix(share=1 - (bottom - top) * (right - left) / size**2, box=(top, bottom, left, right))
