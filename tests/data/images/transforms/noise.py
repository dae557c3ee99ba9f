"""An image of noise, and helpers that the tests of image transforms share."""

import numpy as np
from PIL import Image

NOISE = np.random.default_rng(3).integers(256, size=(40, 50, 3), dtype=np.uint8)


def noise(mode="RGB"):
    return Image.fromarray(NOISE).convert(mode)


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_same(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
