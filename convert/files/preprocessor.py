"""Conversion of preprocessor_config.json, which contains the normalization of pixels.

The vision models here normalize pixels themselves, with the fields `image_mean` and `image_stddev`
of their config. These are for pixels from 0 to 1. The file may express the same normalization in
other units: with rescale_factor=1/255 pixels are from 0 to 1, without rescaling from 0 to 255.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.model_on_disk import Source
from convert.options import DEFAULTS, ReadOptions
from data.checks import is_number
from models.vision.common import ImageInputConfig
from untrusted.documents import read_json
from untrusted.files import copy_file, write_text

FILE = "preprocessor_config.json"
#: The config fields that the file determines.
FIELDS = frozenset({"image_mean", "image_stddev"})

#: Keys that this module reads.
_KNOWN = """
    size crop_size do_resize do_center_crop do_rescale rescale_factor do_normalize image_mean
    image_std
""".split()
#: Keys that do not change the pixels of an image that already has the right size.
_HARMLESS = """
    image_processor_type feature_extractor_type processor_class auto_map _valid_processor_keys
    resample crop_pct default_to_square do_convert_rgb data_format input_data_format
    return_tensors device disable_grouping _processor_class
""".split()

_log = logging.getLogger(__name__)


def read(path: Path, fields: Mapping[str, Any], options: ReadOptions = DEFAULTS) -> dict[str, Any]:
    """Read the normalization of pixels from the directory of a Hugging Face model.

    Args:
        fields: config fields of the model; `image_size` and `num_channels` are read.
        options: set for the command; `harmless` keys do not change pixels.

    Returns:
        The config fields `image_mean` and `image_stddev`; empty if the file does not exist.

    Raises:
        ValueError: A key is unknown, a value has the wrong type, or the file and config.json
            contradict each other on the size or the channels of images.
    """
    file = path / FILE
    if not file.is_file():
        _log.info("%s does not exist: pixels are normalized with model.image_mean", file)
        return {}
    content = read_json(file, within=file.parent)
    for name, value in content.items():
        # A value of None, False, 0 or empty stands for a feature that is not used.
        if name not in (*_KNOWN, *_HARMLESS, *options.harmless) and value:
            raise ValueError(
                f"{file} has {name}={value!r}, which is not supported and may change pixels; "
                f"{options.remedy_for(name)}"
            )
    side = fields["image_size"]
    size = _size(file, content)
    if size not in (None, (side, side)):
        raise ValueError(
            f"{file} produces images of {size[0]} × {size[1]} pixels, but config.json has "
            f"image_size={side}; correct the value that the model was not trained with"
        )
    return _normalisation(file, content, fields["num_channels"])


def write(source: Source, directory: Path) -> None:
    """Write preprocessor_config.json for a vision model; do nothing for a text model.

    The original file is copied if it still describes the model. Otherwise the file is written in
    the format of ViTImageProcessor.
    """
    config = source.config
    if not isinstance(config, ImageInputConfig):
        return
    original = None if source.hf_files is None else source.hf_files / FILE
    if original is not None and original.is_file() and _describes(original, config):
        copy_file(original, directory / FILE, within=original.parent)
        return
    content = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 3,  # Bicubic, as in our data pipeline.
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _per_channel(config.image_mean, config.num_channels),
        "image_std": _per_channel(config.image_stddev, config.num_channels),
    }
    write_text(directory / FILE, json.dumps(content, indent=2) + "\n")


def _describes(file: Path, config: ImageInputConfig) -> bool:
    """Return whether a file describes the image size and the normalization of a model."""
    content = read_json(file, within=file.parent)
    channels = config.num_channels
    normalisation = _normalisation(file, content, channels)
    return _size(file, content) in (None, (config.image_size, config.image_size)) and all(
        _per_channel(value, channels) == _per_channel(getattr(config, name), channels)
        for name, value in normalisation.items()
    )


def _per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return one value per channel."""
    return list(values) * (channels if len(values) == 1 else 1)


def _size(file: Path, content: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the (height, width) of preprocessed images, or None if images keep their size."""
    is_cropped = bool(content.get("do_center_crop"))
    if not is_cropped and not content.get("do_resize", True):
        return None
    key = "crop_size" if is_cropped else "size"
    size = content.get(key)
    if size is None:
        return None
    if not isinstance(size, dict):
        size = {"shortest_edge": size}
    height, width = (size.get(name, size.get("shortest_edge")) for name in ("height", "width"))
    if not isinstance(height, int) or not isinstance(width, int):
        raise ValueError(
            f"{file} has {key}={content[key]!r}, which is not supported; it must be a number, a "
            "height and width, or a shortest_edge"
        )
    return height, width


def _normalisation(file: Path, content: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Return `image_mean` and `image_stddev` in our units, for pixels from 0 to 1."""
    factor = content.get("rescale_factor", 1 / 255) if content.get("do_rescale", True) else 1.0
    if not is_number(factor) or not 0 < factor < math.inf:
        raise ValueError(f"{file} has rescale_factor={factor!r}, which must be a positive number")
    # The largest value of a rescaled pixel; dividing by it converts to pixels from 0 to 1.
    largest = 255 * factor
    fields = {"image_mean": (0.0,), "image_stddev": (1 / largest,)}
    if content.get("do_normalize", True):
        for name, key in (("image_mean", "image_mean"), ("image_stddev", "image_std")):
            fields[name] = tuple(x / largest for x in _numbers(file, content, key, channels))
    if min(fields["image_stddev"]) <= 0:
        raise ValueError(
            f"{file} has image_std={content.get('image_std')!r}, which must be positive"
        )
    return fields


def _numbers(file: Path, content: Mapping[str, Any], key: str, channels: int) -> list[Any]:
    """Return the value of a key as a list of one number, or of one number per channel."""
    value = content.get(key)
    numbers = value if isinstance(value, list) else [value]
    if not all(map(is_number, numbers)) or len(numbers) not in (1, channels):
        raise ValueError(
            f"{file} has {key}={value!r}, which must be a number or a list of "
            f"num_channels={channels} numbers, as in config.json"
        )
    return numbers
