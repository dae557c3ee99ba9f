"""Which part of an image is kept, and its pixels at the size that the model gets."""

import io
import math
from typing import Any

import numpy as np
from PIL import Image

#: (left, top, right, bottom) in pixels; the last two lie outside.
Box = tuple[float, float, float, float]

_MODES = {1: "L", 3: "RGB"}
# Where Pillow converts to grey or to colour by way of another mode alone.
_STEPS = {"LAB": "RGB", "La": "LA"}
# So many random boxes are tried before the central one is taken.
_NUM_TRIES = 10


def open_image(image: Any) -> Image.Image:
    """Returns an image; of encoded bytes, pixels are not decoded yet.

    Args:
        image: Encoded bytes, uint8[height, width] or [height, width, channels], or a PIL image.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(image, Image.Image):
        image.load()
        return image.copy()  # Threads share the image, and to decode it less changes it.
    if isinstance(image, bytes):
        return Image.open(io.BytesIO(image))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.size:
        if image.ndim == 3 and image.shape[2] == 1:
            image = image[:, :, 0]
        if image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4)):
            return Image.fromarray(image)
    if isinstance(image, np.ndarray):
        what = f"a {image.dtype} array of shape {image.shape}"
    else:
        what = f"a {type(image).__name__}"
    raise ValueError(
        f"it is {what}, but must be uint8[height, width, channels], a PIL image or encoded bytes"
    )


def random_box(
    width: int,
    height: int,
    scale: tuple[float, ...],
    ratio: tuple[float, ...],
    random: np.random.Generator,
) -> Box:
    """Returns a random part of an image.

    Args:
        width: Of the image, in pixels; so is `height`.
        scale: Part of the area, at least and at most.
        ratio: Width ÷ height, at least and at most; its logarithm is uniform.
        random: What is drawn comes from here.

    Source: Szegedy et al. 2014 (arXiv:1409.4842), section 6; the ten tries, and the largest central
        box of a fitting ratio after them, are torchvision's RandomResizedCrop.
    """
    for _ in range(_NUM_TRIES):
        area = width * height * random.uniform(scale[0], scale[1])
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(random.integers(width - w + 1))
            top = int(random.integers(height - h + 1))
            return left, top, left + w, top + h
    aspect = min(max(width / height, ratio[0]), ratio[1])
    w = min(width, max(round(height * aspect), 1))
    h = min(height, max(round(width / aspect), 1))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def crop(image: Image.Image, box: Box, size: int, channels: int) -> Image.Image:
    """Returns a box of an image as size × size pixels."""
    scaled, box = _decode(image, box, size, channels)
    return scaled.resize((size, size), Image.Resampling.BICUBIC, box)


def central_crop(image: Image.Image, size: int, channels: int, part: float) -> Image.Image:
    """Returns the middle of an image whose shorter side was brought to size ÷ part pixels."""
    width, height = image.size
    shorter = int(size / part)
    scale = shorter / min(width, height)
    wide, high = (max(round(side * scale), shorter) for side in (width, height))
    scaled, (_, _, right, bottom) = _decode(image, (0, 0, width, height), shorter, channels)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    across, down = right / wide, bottom / high
    # Of what is resized only the middle is made: all of a narrow image could be too much to hold.
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    within = (*box[:2], min(box[2], right), min(box[3], bottom))
    return scaled.resize((size, size), Image.Resampling.BICUBIC, within)


def _decode(image: Image.Image, box: Box, size: int, channels: int) -> tuple[Image.Image, Box]:
    """Returns the image in the mode of `channels`, perhaps smaller, and the box within it."""
    width, height = image.size
    left, top, right, bottom = box
    # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the box still has all pixels needed.
    wanted = width * size / (right - left), height * size / (bottom - top)
    image.draft(_MODES[channels], (math.ceil(wanted[0]), math.ceil(wanted[1])))
    image = to_channels(image, channels)
    across, down = image.width / width, image.height / height
    right, bottom = min(right * across, image.width), min(bottom * down, image.height)
    return image, (left * across, top * down, right, bottom)


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Returns the image in grey or in colour, without transparency, 8 bits a channel."""
    mode = _MODES[channels]
    if image.mode == mode:
        return image
    if image.mode.startswith("I"):
        # Pillow's own conversion clips 16 bits instead of scaling them.
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in _STEPS:
        image = image.convert(_STEPS[image.mode])
    return image if image.mode == mode else image.convert(mode)
