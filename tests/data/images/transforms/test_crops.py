"""Crops and decoding, compared with their definitions and with Pillow's operators."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from data.images.readability import problem_of
from data.images.transforms.crops import central_crop, crop, open_image, random_box, to_channels
from tests.data.images.pictures import encoded
from tests.data.images.transforms.noise import NOISE, assert_same, noise, rng


def test_random_boxes_have_the_requested_areas_and_ratios():
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


def test_image_that_fits_no_box_gives_the_largest_central_one():
    assert random_box(1000, 10, (0.5, 1.0), (3 / 4, 4 / 3), rng()) == (493, 0, 506, 10)
    assert random_box(10, 1000, (0.5, 1.0), (3 / 4, 4 / 3), rng()) == (0, 493, 10, 506)
    assert random_box(10, 10, (1.0, 1.0), (1.0, 1.0), rng()) == (0, 0, 10, 10)
    assert random_box(1, 50, (1.0, 1.0), (3.0, 4.0), rng()) == (0, 24, 1, 25), "of one pixel"


def test_crop_equals_pillows_resize_of_the_box():
    expected = noise().crop((5, 10, 45, 34)).resize((16, 16), Image.Resampling.BICUBIC)
    found = np.asarray(crop(noise(), (5, 10, 45, 34), 16, 3)).astype(int)
    # At the edges of the box, resizing may use pixels outside it, which a cropped image lacks.
    assert_same(found[2:-2, 2:-2], np.asarray(expected).astype(int)[2:-2, 2:-2])


def test_central_crop_takes_the_center_of_the_resized_image():
    ramp = np.tile(np.arange(200, dtype=np.uint8), (100, 1))
    found = np.asarray(central_crop(Image.fromarray(ramp), 80, 1, 0.8))
    # An image of 100 x 200 keeps its size, and the central 80 x 80 are cropped.
    assert_same(found, ramp[10:90, 60:140])
    assert central_crop(noise(), 224, 3, 0.875).size == (224, 224)


def test_central_crop_equals_the_center_of_the_resized_image():
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


@pytest.mark.drawn(6)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.7, 0.875, 1.0])
@pytest.mark.parametrize("width, height", [(8, 8), (12, 10), (3, 5), (1, 30), (200, 100)])
def test_central_part_is_centered_for_any_image_size(width, height, part):
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


def test_large_jpeg_is_decoded_at_reduced_size_with_similar_pixels():
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
def test_all_image_modes_are_converted_to_the_channels(channels, mode):
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
def test_open_image_accepts_arrays_images_and_bytes(image):
    expected = NOISE if np.size(image) != NOISE[:, :, 0].size else NOISE[:, :, 0]
    assert_same(open_image(image), expected)


def twelve_bit_tiff(values: np.ndarray) -> bytes:
    """Return a TIFF with 12 bits per pixel, which Pillow reads but does not write."""
    bits = "".join(f"{value:012b}" for value in values.reshape(-1))
    pixels = int(bits, 2).to_bytes(len(bits) // 8)
    height, width = values.shape
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height}
    tags[279] = len(pixels)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    start = struct.pack("<2sHI", b"II", 42, 8 + len(pixels))
    return start + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("name", ["png", "tiff", "ppm", "12 bits"])
def test_gray_images_of_more_than_8_bits_are_scaled(name):
    num_bits = 12 if name == "12 bits" else 16
    values = np.arange(0, 2**num_bits, 2**num_bits // 64).reshape(8, 8)
    deep = values.astype(np.uint16)[:, :, None]
    content = twelve_bit_tiff(values) if num_bits == 12 else encoded(deep, name)
    found = np.asarray(to_channels(open_image(content), 1)).astype(float)
    # A gray value of 8 bits is one of 256 steps, from 0 to 255.
    np.testing.assert_allclose(found / 255, values / (2**num_bits - 1), atol=1 / 255)


@pytest.mark.parametrize("dtype, kind", [("f4", "floating-point numbers"), ("i4", "32-bit integ")])
def test_images_without_a_range_of_values_are_refused(dtype, kind):
    """Pillow would clip a float from 0 to 1 to black, and a large integer to white."""
    pixels = (NOISE[:, :, :1] / 255 * (1 if dtype == "f4" else 2**31 - 1)).astype(dtype)
    content = encoded(pixels, "tiff")
    assert (problem_of(content) or "").startswith(f"ValueError: its pixels are {kind}")
    with pytest.raises(ValueError, match="not known; save it with 8 or 16 bits"):
        open_image(content)


@pytest.mark.parametrize("image", ["a.png", NOISE / 255, NOISE[None], NOISE[:, :0], 7])
def test_open_image_rejects_other_values(image):
    with pytest.raises(ValueError, match=r"must be uint8\[height, width, channels\]"):
        open_image(image)
