"""The augmentation of an image as configured: erasing, mirroring, and probabilities."""

import math
from typing import Any

import numpy as np
from PIL import Image

from data.image_config import ImageConfig
from data.images.transforms.augment import augment, central, erase
from tests.data.images.transforms.noise import NOISE, assert_same, noise, rng


def test_erased_rectangles_have_the_published_areas_and_ratios():
    areas = []
    ratios = []
    random = rng()
    for _ in range(2000):
        pixels = erase(np.full((100, 80, 3), 77, np.uint8), random)
        rows, columns = ((pixels != 77).any(axis=(1 - axis, 2)) for axis in (0, 1))
        height = np.ptp(np.flatnonzero(rows)) + 1
        width = np.ptp(np.flatnonzero(columns)) + 1
        areas.append(height * width / 8000)
        ratios.append(height / width)
    assert 0.018 < min(areas) and max(areas) < 0.35
    assert 0.26 < min(ratios) and max(ratios) < 1 / 0.26
    # Areas are uniform from 0.02 to 1/3, except for the few large ones that do not fit.
    assert abs(np.mean(areas) - 0.17) < 0.015
    assert abs(np.mean(np.log(ratios))) < 0.1


def test_erasing_fills_with_noise():
    random = rng()
    values = np.concatenate([erase(np.zeros((60, 60, 1), np.uint8), random) for _ in range(50)])
    inked = values[values > 0]
    assert abs(inked.mean() - 128) < 3 and inked.min() == 1 and inked.max() == 255


def test_nothing_is_changed_by_default():
    config = ImageConfig(size=16, channels=3)
    expected = noise().resize((16, 16), Image.Resampling.BICUBIC)
    assert_same(augment(noise(), config, rng()), expected)
    square = Image.fromarray(NOISE[:, :40])
    assert_same(central(square, config), square.resize((16, 16), Image.Resampling.BICUBIC))


def test_half_of_the_images_are_mirrored():
    config = ImageConfig(size=40, channels=3, flip=True)
    square = Image.fromarray(NOISE[:, :40])
    random = rng()
    found = [augment(square, config, random) for _ in range(400)]
    mirrored = [np.array_equal(image, NOISE[:, :40][:, ::-1]) for image in found]
    same = [np.array_equal(image, NOISE[:, :40]) for image in found]
    assert sum(mirrored) + sum(same) == 400
    assert abs(sum(mirrored) - 200) < 40  # Four standard errors.


def test_each_view_has_its_own_probabilities():
    config = ImageConfig(size=20, channels=3, blur=(1.0, 0.0), solarize=(0.0, 1.0))
    plain = np.asarray(noise().resize((20, 20), Image.Resampling.BICUBIC))
    first, second = (augment(noise(), config, rng(), view).astype(int) for view in (0, 1))
    assert_same(second, np.where(plain < 128, plain, 255 - plain))
    assert first.std() < plain.std() and not np.array_equal(first, plain)


def test_changes_are_applied_with_the_configured_probabilities():
    flat = Image.new("RGB", (20, 20), (200, 100, 50))
    cases: list[tuple[dict[str, Any], float]] = [
        ({"grayscale": 0.3}, 0.3),
        ({"erasing": 0.25}, 0.25),
        ({"jitter": (0.4, 0.0, 0.0, 0.0), "jitter_probability": 0.6}, 0.6),
    ]
    for changes, share in cases:
        config = ImageConfig(size=20, channels=3, **changes)
        random = rng()
        changed = [(augment(flat, config, random) != np.asarray(flat)).any() for _ in range(1000)]
        # Four standard errors. The additional 0.005 allows for factors within 1 ± 0.002, which
        # change no pixel.
        assert abs(np.mean(changed) - share) < 4 * math.sqrt(share * (1 - share) / 1000) + 0.005
