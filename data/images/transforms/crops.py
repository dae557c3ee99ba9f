"""Decode an image, crop it, and resize it to the size that the model receives."""

import io
import math
from typing import Any

import numpy as np
from PIL import Image

#: (left, top, right, bottom) in pixels; right and bottom are exclusive.
Box = tuple[float, float, float, float]

_MODES = {1: "L", 3: "RGB"}
# Modes that Pillow can convert to gray or to color only via another mode -> that mode.
_STEPS = {"LAB": "RGB", "La": "LA"}
# The tag of a TIFF with the number of bits of each channel.
_BITS_PER_SAMPLE = 258
# Number of random boxes to try before falling back to a central one.
_NUM_TRIES = 10


#: The most pixels of an encoded image. A few hundred kilobytes can decode to gigabytes.
MAX_PIXELS = 2**26

#: The formats of Pillow that are opened. Some others start programs, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")


def open_image(image: Any) -> Image.Image:
    """Open an image. Encoded bytes, in one of FORMATS, are not decoded yet.

    Args:
        image: encoded bytes, an array uint8[height, width] or uint8[height, width, channels] with
            1, 3 or 4 channels, or a PIL image.

    Raises:
        ValueError: `image` is none of these, its pixels have no range that can be scaled to 8 bits,
            or encoded bytes have more than MAX_PIXELS pixels.
    """
    if isinstance(image, Image.Image):
        image.load()
        _check_range(image)
        return image.copy()  # Threads share the image, and `Image.draft` would modify it.
    if isinstance(image, bytes):
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width} × {opened.height} pixels, but at most {MAX_PIXELS:,} are "
                "decoded; scale it down"
            )
        _check_range(opened)
        return opened
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


def _check_range(image: Image.Image) -> None:
    """Refuse pixels whose black and white the format does not define.

    In a float TIFF, white may be 1, 255 or anything else, and PyTorch's readers do not scale it:
    they clip it to 0 to 255. 32-bit integers of a TIFF are measurements as well; other formats use
    Pillow's mode "I" for 16 bits.
    """
    is_integer = image.mode == "I" and image.format == "TIFF"
    if image.mode == "F" or is_integer:
        kind = "32-bit integers" if is_integer else "floating-point numbers"
        raise ValueError(
            f"its pixels are {kind}, whose values for black and white are not known; save it with "
            "8 or 16 bits"
        )


def random_box(
    width: int,
    height: int,
    scale: tuple[float, ...],
    ratio: tuple[float, ...],
    random: np.random.Generator,
) -> Box:
    """Draw a random box of an image.

    Args:
        scale: minimum and maximum fraction of the area.
        ratio: minimum and maximum width ÷ height; its logarithm is uniformly distributed.

    Returns:
        The box. If none of ten boxes fits into the image, it is the largest central box with an
        allowed ratio.

    Source: Szegedy et al. 2014 (arXiv:1409.4842), section 6. The ten attempts and the central box
        follow torchvision's RandomResizedCrop.
    """
    for _ in range(_NUM_TRIES):
        area = width * height * random.uniform(scale[0], scale[1])
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(random.integers(width - w + 1))
            top = int(random.integers(height - h + 1))
            return left, top, left + w, top + h
    aspect = min(max(width / height, ratio[0]), ratio[1])
    w = min(width, max(round(height * aspect), 1))
    h = min(height, max(round(width / aspect), 1))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h


def crop(image: Image.Image, box: Box, size: int, channels: int) -> Image.Image:
    """Crop a box and resize it to size × size pixels (bicubic), in mode L or RGB.

    Args:
        image: image, preferably not decoded yet.
        box: box to keep, in pixels of the image.
        size: height and width of the result in pixels.
        channels: 1 or 3.
    """
    scaled, box = _decode(image, box, size, channels)
    return scaled.resize((size, size), Image.Resampling.BICUBIC, box)


def central_crop(image: Image.Image, size: int, channels: int, part: float) -> Image.Image:
    """Resize the shorter side to size ÷ part pixels, and crop the center, in mode L or RGB.

    Args:
        image: image, preferably not decoded yet.
        size: height and width of the result in pixels.
        channels: 1 or 3.
        part: `images.eval_crop`: the side of the crop ÷ the shorter side of the resized image.
    """
    width, height = image.size
    shorter = int(size / part)
    scale = shorter / min(width, height)
    wide, high = (max(round(side * scale), shorter) for side in (width, height))
    scaled, (_, _, right, bottom) = _decode(image, (0, 0, width, height), shorter, channels)
    left = round((wide - size) / 2)
    top = round((high - size) / 2)
    across = right / wide
    down = bottom / high
    # Compute the box in pixels of the decoded image, and resize only this box. The whole resized
    # image could be too large for memory if the image is very narrow.
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    within = (*box[:2], min(box[2], right), min(box[3], bottom))
    return scaled.resize((size, size), Image.Resampling.BICUBIC, within)


def _decode(image: Image.Image, box: Box, size: int, channels: int) -> tuple[Image.Image, Box]:
    """Decode an image, at reduced size if possible.

    Args:
        box: box that is going to be resized to size × size pixels.

    Returns:
        The image, of mode L or RGB, and the box in pixels of that image.
    """
    width, height = image.size
    left, top, right, bottom = box
    # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the box still has at least size × size
    # pixels.
    wanted = width * size / (right - left), height * size / (bottom - top)
    image.draft(_MODES[channels], (math.ceil(wanted[0]), math.ceil(wanted[1])))
    image = to_channels(image, channels)
    across = image.width / width
    down = image.height / height
    right = min(right * across, image.width)
    bottom = min(bottom * down, image.height)
    return image, (left * across, top * down, right, bottom)


def _num_bits(image: Image.Image) -> int:
    """Return the bits of a pixel of a gray image with more than 8: 16, or 12 in some TIFFs."""
    tags = getattr(image, "tag_v2", {})
    return 12 if tags.get(_BITS_PER_SAMPLE) == (12,) else 16


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image to 1 (gray) or 3 (RGB) channels of 8 bits, without transparency."""
    mode = _MODES[channels]
    if image.mode == mode:
        return image
    if image.mode.startswith("I"):
        # Pillow's own conversion clips 16-bit values instead of scaling them.
        grey = np.asarray(image).astype(np.int64) >> (_num_bits(image) - 8)
        image = Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in _STEPS:
        image = image.convert(_STEPS[image.mode])
    return image if image.mode == mode else image.convert(mode)
