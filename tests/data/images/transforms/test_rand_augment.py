"""RandAugment, compared with its published operations."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from data.images.transforms.rand_augment import OPERATIONS, rand_augment
from tests.data.images.transforms.noise import NOISE, assert_same, noise, rng

#: Name of an operation -> Pillow's operation with the argument of timm's tables at half strength.
HALF = {
    "auto_contrast": lambda image: ImageOps.autocontrast(image),
    "equalize": lambda image: ImageOps.equalize(image),
    "invert": lambda image: ImageOps.invert(image),
    "rotate": lambda image: image.rotate(15, Image.Resampling.BICUBIC, fillcolor=(124, 116, 104)),
    "posterize": lambda image: ImageOps.posterize(image, 2),
    "solarize": lambda image: ImageOps.solarize(image, 128),
    "solarize_add": lambda image: Image.fromarray(np.where(NOISE < 128, NOISE + 55, NOISE)),
    "color": lambda image: ImageEnhance.Color(image).enhance(1.45),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.45),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.45),
    "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.45),
}


@pytest.mark.parametrize("name", HALF)
def test_rand_augment_operation_at_half_strength(name):
    assert_same(OPERATIONS[name](noise(), 0.5, 1.0), HALF[name](noise()))


@pytest.mark.parametrize("name, axis", [("translate_x", 1), ("translate_y", 0)])
def test_rand_augment_translates_by_a_fraction_of_the_side(name, axis):
    # 0.45 of 40 pixels are 18: a shift by whole pixels needs no interpolation.
    image = Image.fromarray(NOISE[:, :40])
    moved = np.asarray(OPERATIONS[name](image, 1.0, 1.0)).astype(int)
    whole = np.moveaxis(np.asarray(image).astype(int), axis, 0)
    moved = np.moveaxis(moved, axis, 0)
    assert_same(moved[:20], whole[18:38])
    assert (moved[23:] == [124, 116, 104]).all()


def test_rand_augment_shears_by_three_tenths():
    image = Image.new("L", (100, 101))
    image.paste(255, (50, 0, 51, 101))
    sheared = np.asarray(OPERATIONS["shear_x"](image, 1.0, 1.0))
    # The column at 50 moves 0.3 pixels further to the left with each row.
    assert [int(sheared[row].argmax()) for row in (10, 30, 60)] == [47, 41, 32]
    down = np.asarray(OPERATIONS["shear_y"](image.transpose(Image.Transpose.TRANSPOSE), 1.0, 1.0))
    assert [int(down[:, column].argmax()) for column in (10, 30, 60)] == [47, 41, 32]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rand_augment_keeps_mode_and_size_at_every_strength(name, mode):
    for strength in (0.0, 0.33, 1.0):
        for sign in (1.0, -1.0):
            changed = OPERATIONS[name](noise(mode), strength, sign)
            assert changed.mode == mode and changed.size == (50, 40)


def test_rand_augment_applies_half_of_the_drawn_operations(monkeypatch):
    done = []
    for name in OPERATIONS:
        monkeypatch.setitem(
            OPERATIONS, name, lambda image, *how, name=name: done.append((name, *how)) or image
        )
    random = rng()
    for _ in range(3000):
        rand_augment(noise(), 2, 9.0, random)
    names, strengths, signs = zip(*done, strict=True)
    # Half of the 6000 drawn operations are applied; four standard errors are 155.
    assert abs(len(done) - 3000) < 155
    counts = [names.count(name) for name in OPERATIONS]
    assert len(counts) == 15 and abs(np.array(counts) - 200).max() < 60
    # Magnitudes are N(9, 0.5) clipped at 10, which 2.3 % of the draws exceed.
    assert max(strengths) == 1 and abs(np.mean(np.array(strengths) == 1) - 0.0228) < 0.011
    assert abs(np.median(strengths) - 0.9) < 0.005 and abs(np.mean(signs)) < 0.08
    done.clear()
    assert rand_augment(noise(), 0, 9.0, random) is not None and not done
