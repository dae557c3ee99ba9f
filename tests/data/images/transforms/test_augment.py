"""Image transforms, compared with their published definitions and with Pillow's operators."""

import io
import math
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from data.image_config import ImageConfig
from data.images.transforms.augment import augment, central, erase
from data.images.transforms.colors import jitter, shift_hue, solarized, without_color
from data.images.transforms.crops import central_crop, crop, open_image, random_box, to_channels
from data.images.transforms.mixing import draw_mix
from data.images.transforms.rand_augment import OPERATIONS, rand_augment
from tests.data.images.pictures import encoded

NOISE = np.random.default_rng(3).integers(256, size=(40, 50, 3), dtype=np.uint8)


def noise(mode="RGB"):
    return Image.fromarray(NOISE).convert(mode)


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_same(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# Crops.


def test_random_boxes_have_the_areas_and_ratios_that_are_asked_for():
    width = 640
    height = 480
    scale = (0.08, 1.0)
    ratio = (3 / 4, 4 / 3)
    random = rng()
    boxes = np.array([random_box(width, height, scale, ratio, random) for _ in range(4000)])
    left, top, right, bottom = boxes.T
    assert (left >= 0).all() and (top >= 0).all()
    assert (right <= width).all() and (bottom <= height).all()
    areas = (right - left) * (bottom - top) / (width * height)
    ratios = (right - left) / (bottom - top)
    # The tolerances allow for rounding to whole pixels; the sides of a small box are about 100.
    assert 0.079 < areas.min() and areas.max() <= 1
    assert 0.73 < ratios.min() and ratios.max() < 1.36
    # Boxes that do not fit are drawn again, and most of these are large. Areas of small boxes are
    # uniform from 0.08 to 0.5, and four standard errors of their mean are 0.01.
    small = areas[areas < 0.5]
    assert abs(small.mean() - 0.29) < 0.01
    # The logarithm of the ratio is uniform, so as many are below 1 as above.
    assert abs((ratios[areas < 0.5] < 1).mean() - 0.5) < 0.05
    # Positions are uniform: on average, the center of a box is the center of the image.
    assert abs(((left + right) / 2).mean() - width / 2) < 6
    assert abs(((top + bottom) / 2).mean() - height / 2) < 6


def test_image_that_no_box_fits_gives_its_largest_central_one():
    assert random_box(1000, 10, (0.5, 1.0), (3 / 4, 4 / 3), rng()) == (493, 0, 506, 10)
    assert random_box(10, 1000, (0.5, 1.0), (3 / 4, 4 / 3), rng()) == (0, 493, 10, 506)
    assert random_box(10, 10, (1.0, 1.0), (1.0, 1.0), rng()) == (0, 0, 10, 10)
    assert random_box(1, 50, (1.0, 1.0), (3.0, 4.0), rng()) == (0, 24, 1, 25), "of one pixel"


def test_crop_is_pillows_resize_of_the_box():
    expected = noise().crop((5, 10, 45, 34)).resize((16, 16), Image.Resampling.BICUBIC)
    found = np.asarray(crop(noise(), (5, 10, 45, 34), 16, 3)).astype(int)
    # At the edges of the box, resizing may use pixels outside it, which a cropped image lacks.
    assert_same(found[2:-2, 2:-2], np.asarray(expected).astype(int)[2:-2, 2:-2])


def test_central_crop_takes_the_middle_of_the_resized_image():
    ramp = np.tile(np.arange(200, dtype=np.uint8), (100, 1))
    found = np.asarray(central_crop(Image.fromarray(ramp), 80, 1, 0.8))
    # An image of 100 x 200 keeps its size, and the central 80 x 80 are cropped.
    assert_same(found, ramp[10:90, 60:140])
    assert central_crop(noise(), 224, 3, 0.875).size == (224, 224)


def test_central_crop_is_the_middle_of_the_whole_image_resized():
    """The result is the same up to rounding, although only the middle is computed."""
    for size in ((300, 200), (257, 911), (64, 63)):
        image = Image.fromarray(rng().integers(0, 256, (*size, 3), np.uint8))
        scale = 64 / min(size)
        whole = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
        left, top = (round((side - 56) / 2) for side in whole.size)
        expected = np.asarray(whole.crop((left, top, left + 56, top + 56)), int)
        found = np.asarray(central_crop(image, 56, 3, 0.875), int)
        assert np.abs(found - expected).max() <= 1 and (found != expected).mean() < 0.001
    line = Image.fromarray(rng().integers(0, 256, (1, 8000), np.uint8))
    assert central_crop(line, 224, 1, 0.875).size == (224, 224)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.7, 0.875, 1.0])
@pytest.mark.parametrize("width, height", [(8, 8), (12, 10), (3, 5), (1, 30), (200, 100)])
def test_any_part_is_the_middle_of_images_of_any_size(width, height, part):
    # Values increase from the first column, 0, to the last one, 250.
    ramp = np.tile(np.linspace(0, 250, width), (height, 1))
    found = np.asarray(central_crop(Image.fromarray(ramp.round().astype(np.uint8)), 8, 1, part))
    assert found.shape == (8, 8)
    wide = width * int(8 / part) / min(width, height)
    # The centers of the eight columns as fractions of the image's width.
    places = (np.arange(8) + 0.5 + round((wide - 8) / 2)) / wide
    expected = np.interp(places * width - 0.5, np.arange(width), ramp[0])
    # A pixel of the result is a mean of many pixels, and the edges of the image distort the ramp.
    assert np.abs(found.astype(float) - expected[None]).max() < (25 if width > 1 else 1)


def test_large_jpeg_is_decoded_small_and_looks_the_same():
    smooth = Image.fromarray(NOISE[:8, :10]).resize((1000, 800), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    smooth.save(stream, "jpeg", quality=95)
    image = open_image(stream.getvalue())
    box = (100, 50, 900, 650)
    small = np.asarray(crop(image, box, 64, 3)).astype(int)
    assert image.size == (125, 100), "it was not decoded at an eighth"
    whole = np.asarray(smooth.resize((64, 64), Image.Resampling.BICUBIC, box)).astype(int)
    # The compression error of JPEG is about 1 for such a smooth image.
    assert np.abs(small - whole).mean() < 1.5 and np.abs(small - whole).max() < 12


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB")])
def test_images_of_every_kind_are_brought_to_the_channels(channels, mode):
    palette = noise().quantize(16)
    palette.info["transparency"] = bytes(16)
    deep = Image.fromarray((NOISE[:, :, 0].astype(np.uint16) << 8) + 17)
    rare = [Image.new(mode, (50, 40)) for mode in ("LAB", "La", "RGBa", "PA", "YCbCr", "F", "1")]
    common = [noise(kind) for kind in ("RGB", "L", "RGBA", "LA", "CMYK")]
    for image in (*common, *rare, palette, deep):
        converted = to_channels(image, channels)
        assert converted.mode == mode and converted.size == (50, 40)
    # 16-bit values are scaled to 8 bits, not clipped.
    assert_same(to_channels(deep, 1), NOISE[:, :, 0])


@pytest.mark.parametrize(
    "image",
    [NOISE, NOISE[:, :, 0], NOISE[:, :, :1], noise(), encoded(NOISE, "png"), encoded(NOISE, "bmp")],
    ids=["array", "two dims", "one channel", "PIL", "png", "bmp"],
)
def test_open_image_takes_arrays_images_and_bytes(image):
    expected = NOISE if np.size(image) != NOISE[:, :, 0].size else NOISE[:, :, 0]
    assert_same(open_image(image), expected)


@pytest.mark.parametrize("image", ["a.png", NOISE / 255, NOISE[None], NOISE[:, :0], 7])
def test_open_image_refuses_what_is_none(image):
    with pytest.raises(ValueError, match=r"must be uint8\[height, width, channels\]"):
        open_image(image)


# Colors.


def test_jitter_of_one_kind_is_pillows_enhancer():
    for which, kind in enumerate((ImageEnhance.Brightness, ImageEnhance.Contrast)):
        strength = tuple(0.4 if i == which else 0.0 for i in range(4))
        random = rng(5)
        random.permutation(4)
        factor = random.uniform(0.6, 1.4)
        assert_same(jitter(noise(), strength, rng(5)), kind(noise()).enhance(factor))


def test_hue_turns_round_the_circle():
    red = Image.new("RGB", (2, 2), (255, 0, 0))
    assert np.asarray(shift_hue(red, 1 / 3))[0, 0].argmax() == 1
    assert np.asarray(shift_hue(red, -1 / 3))[0, 0].argmax() == 2
    assert_same(shift_hue(red, 0), red)


def test_grey_and_inverted_images():
    grey = np.asarray(without_color(noise()))
    assert (grey == grey[:, :, :1]).all()
    assert_same(grey[:, :, 0], noise("L"))
    assert_same(solarized(noise()), np.where(NOISE < 128, NOISE, 255 - NOISE))


# RandAugment.

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
def test_rand_augment_translates_by_a_part_of_the_side(name, axis):
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


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rand_augment_keeps_mode_and_size_at_every_strength(name, mode):
    for strength in (0.0, 0.33, 1.0):
        for sign in (1.0, -1.0):
            changed = OPERATIONS[name](noise(mode), strength, sign)
            assert changed.mode == mode and changed.size == (50, 40)


def test_rand_augment_does_half_of_what_it_draws(monkeypatch):
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


# Erasing.


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


# The whole pipeline.


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


def test_probabilities_of_each_view_are_its_own():
    config = ImageConfig(size=20, channels=3, blur=(1.0, 0.0), solarize=(0.0, 1.0))
    plain = np.asarray(noise().resize((20, 20), Image.Resampling.BICUBIC))
    first, second = (augment(noise(), config, rng(), view).astype(int) for view in (0, 1))
    assert_same(second, np.where(plain < 128, plain, 255 - plain))
    assert first.std() < plain.std() and not np.array_equal(first, plain)


def test_changes_come_as_often_as_configured():
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


# Mixing.


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


def test_pairs_are_mixed_as_often_as_configured_by_either_kind():
    config = ImageConfig(mixup=0.8, cutmix=1.0, mixing_probability=0.6, cutmix_share=0.25)
    random = rng()
    mixes = [draw_mix(config, random) for _ in range(2000)]
    assert abs(np.mean([mix.share < 1 or mix.box is not None for mix in mixes]) - 0.6) < 0.045
    assert abs(np.mean([mix.box is not None for mix in mixes]) - 0.15) < 0.035
