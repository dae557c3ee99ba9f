"""MixUp and CutMix: shares, boxes, and how often they are applied."""

import numpy as np
import pytest

from data.image_config import ImageConfig
from data.images.transforms.mixing import draw_mix
from tests.data.images.transforms.noise import NOISE, rng


def test_mixup_blends_by_its_share():
    config = ImageConfig(size=40, channels=3, mixup=0.8)
    random = rng()
    shares = [draw_mix(config, random) for _ in range(2000)]
    assert all(mix.box is None for mix in shares)
    values = np.array([mix.share for mix in shares])
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)) = 0.0962.
    assert abs(values.mean() - 0.5) < 0.03 and abs(values.var() - 0.0962) < 0.01
    one = NOISE[:, :40]
    other = NOISE[:, 10:]
    expected = np.rint(shares[0].share * one.astype(float) + (1 - shares[0].share) * other)
    # In float32, a value close to a half may be rounded the other way.
    np.testing.assert_allclose(shares[0](one, other).astype(float), expected, atol=1)
    assert (shares[0](one, other) == expected).mean() > 0.99


def test_cutmix_pastes_a_box_of_its_share():
    config = ImageConfig(size=40, channels=1, cutmix=1.0)
    random = rng()
    one = np.zeros((40, 40, 1), np.uint8)
    other = np.ones((40, 40, 1), np.uint8)
    shares = []
    for _ in range(2000):
        mix = draw_mix(config, random)
        shares.append(mix.share)
        pasted = mix(one, other)
        assert pasted.mean() == pytest.approx(1 - mix.share)
        assert not one.any(), "the image itself was changed"
        rows = pasted[:, :, 0].any(1)
        columns = pasted[:, :, 0].any(0)
        assert pasted.sum() == rows.sum() * columns.sum(), "it is not a rectangle"
    # The share is uniform, except that up to half of a box's side may be outside the image.
    assert 0.5 < np.mean(shares) < 0.75 and min(shares) < 0.1 and max(shares) > 0.99


def test_mixup_and_cutmix_are_applied_with_the_configured_probabilities():
    config = ImageConfig(mixup=0.8, cutmix=1.0, mixing_probability=0.6, cutmix_share=0.25)
    random = rng()
    mixes = [draw_mix(config, random) for _ in range(2000)]
    assert abs(np.mean([mix.share < 1 or mix.box is not None for mix in mixes]) - 0.6) < 0.045
    assert abs(np.mean([mix.box is not None for mix in mixes]) - 0.15) < 0.035
