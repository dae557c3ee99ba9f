"""Changes of color, compared with Pillow's operators."""

import numpy as np
from PIL import Image, ImageEnhance

from data.images.transforms.colors import jitter, shift_hue, solarize, without_color
from tests.data.images.transforms.noise import NOISE, assert_same, noise, rng


def test_jitter_of_one_kind_equals_pillows_enhancer():
    for which, kind in enumerate((ImageEnhance.Brightness, ImageEnhance.Contrast)):
        strength = tuple(0.4 if i == which else 0.0 for i in range(4))
        random = rng(5)
        random.permutation(4)
        factor = random.uniform(0.6, 1.4)
        assert_same(jitter(noise(), strength, rng(5)), kind(noise()).enhance(factor))


def test_hue_shift_is_periodic():
    red = Image.new("RGB", (2, 2), (255, 0, 0))
    assert np.asarray(shift_hue(red, 1 / 3))[0, 0].argmax() == 1
    assert np.asarray(shift_hue(red, -1 / 3))[0, 0].argmax() == 2
    assert_same(shift_hue(red, 0), red)


def test_grey_and_inverted_images():
    grey = np.asarray(without_color(noise()))
    assert (grey == grey[:, :, :1]).all()
    assert_same(grey[:, :, 0], noise("L"))
    assert_same(solarize(noise()), np.where(NOISE < 128, NOISE, 255 - NOISE))
