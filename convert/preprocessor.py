"""preprocessor_config.json: how pixels are normalised, which our models of images do themselves."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.model_on_disk import Source
from convert.tensor_files import read_json
from data.checks import is_number
from models.vision.common import ImageInputConfig

FILE = "preprocessor_config.json"
#: What it says of our config.
FIELDS = frozenset({"image_mean", "image_stddev"})

#: Keys that are read here.
_KNOWN = """
    size crop_size do_resize do_center_crop do_rescale rescale_factor do_normalize image_mean
    image_std
""".split()
#: Keys that change no pixel of an image of the right size.
_HARMLESS = """
    image_processor_type feature_extractor_type processor_class auto_map _valid_processor_keys
    resample crop_pct default_to_square do_convert_rgb data_format input_data_format
    return_tensors device disable_grouping _processor_class
""".split()

_log = logging.getLogger(__name__)


def read(path: Path, fields: Mapping[str, Any], *, harmless: Sequence[str] = ()) -> dict[str, Any]:
    """Returns `image_mean` and `image_stddev` as a Hugging Face model's directory says them.

    Args:
      path: the directory; without the file in it, nothing is returned.
      fields: `image_size` and `num_channels` of our config.
      harmless: keys that are known to change no pixel.

    Raises:
      ValueError: a key is unknown, a value is of the wrong kind, or the file and config.json are
        for images of different sizes or channels.
    """
    file = path / FILE
    if not file.is_file():
        _log.info("%s is not there: pixels are normalised as model.image_mean says", file)
        return {}
    said = read_json(file)
    for name, value in said.items():
        # None, False, 0 and empty: a feature that is not used.
        if name not in (*_KNOWN, *_HARMLESS, *harmless) and value:
            raise ValueError(
                f"{file} has {name}={value!r}, which is not supported, and may change pixels; "
                f"if it does not, `python -m convert.from_hf --harmless={name}` converts it"
            )
    side, size = fields["image_size"], _size(file, said)
    if size not in (None, (side, side)):
        raise ValueError(
            f"{file} makes images of {size[0]} × {size[1]} pixels, and config.json has "
            f"image_size={side}; correct the one that the model was not trained with"
        )
    return _normalisation(file, said, fields["num_channels"])


def write(source: Source, directory: Path) -> None:
    """Writes the file as ViTImageProcessor reads it, or as it was, if it says what the model does.

    Nothing is written for a model of text.
    """
    config = source.config
    if not isinstance(config, ImageInputConfig):
        return
    original = None if source.hf_files is None else source.hf_files / FILE
    if original is not None and original.is_file() and _says(original, config):
        (directory / FILE).write_text(original.read_text())
        return
    said = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 3,  # bicubic, as our data is resized
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _of_all(config.image_mean, config.num_channels),
        "image_std": _of_all(config.image_stddev, config.num_channels),
    }
    (directory / FILE).write_text(json.dumps(said, indent=2) + "\n")


def _says(file: Path, config: ImageInputConfig) -> bool:
    """Returns whether a file says of pixels what a model does with them."""
    said, channels = read_json(file), config.num_channels
    normalisation = _normalisation(file, said, channels)
    return _size(file, said) in (None, (config.image_size, config.image_size)) and all(
        _of_all(value, channels) == _of_all(getattr(config, name), channels)
        for name, value in normalisation.items()
    )


def _of_all(values: Sequence[float], channels: int) -> list[float]:
    """Returns a value for each channel."""
    return list(values) * (channels if len(values) == 1 else 1)


def _size(file: Path, said: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns (height, width) of what is made of an image, or None if it is left as it is."""
    is_cropped = bool(said.get("do_center_crop"))
    if not is_cropped and not said.get("do_resize", True):
        return None
    key = "crop_size" if is_cropped else "size"
    size = said.get(key)
    if size is None:
        return None
    if not isinstance(size, dict):
        size = {"shortest_edge": size}
    height, width = (size.get(name, size.get("shortest_edge")) for name in ("height", "width"))
    if not isinstance(height, int) or not isinstance(width, int):
        raise ValueError(
            f"{file} has {key}={said[key]!r}, which is not supported; only a number, height and "
            "width, or shortest_edge can be had"
        )
    return height, width


def _normalisation(file: Path, said: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Returns our two fields, which are for pixels of 0 to 1, where theirs may be otherwise."""
    factor = said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 1.0
    if not is_number(factor) or not 0 < factor < math.inf:
        raise ValueError(f"{file} has rescale_factor={factor!r}, which must be a positive number")
    largest = 255 * factor
    fields = {"image_mean": (0.0,), "image_stddev": (1 / largest,)}
    if said.get("do_normalize", True):
        for name, key in (("image_mean", "image_mean"), ("image_stddev", "image_std")):
            fields[name] = tuple(x / largest for x in _numbers(file, said, key, channels))
    if min(fields["image_stddev"]) <= 0:
        raise ValueError(f"{file} has image_std={said.get('image_std')!r}, which must be positive")
    return fields


def _numbers(file: Path, said: Mapping[str, Any], key: str, channels: int) -> list[Any]:
    """Returns one number, or one for each channel."""
    value = said.get(key)
    numbers = value if isinstance(value, list) else [value]
    if not all(map(is_number, numbers)) or len(numbers) not in (1, channels):
        raise ValueError(
            f"{file} has {key}={value!r}; it must be a number, or one for each of the "
            f"num_channels={channels} of config.json"
        )
    return numbers
