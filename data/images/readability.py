"""Checks that images can be decoded, done once per image before the first step.

Problems are reported together. Depending on `images.on_broken`, the run stops with a message that
lists them, or continues without the broken images.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from data.cache import read_array, write_array
from data.checks import first_names
from data.config import DataConfig
from data.image_config import ImageConfig
from data.images.transforms.crops import open_image
from untrusted.cached import locked
from untrusted.files import read_bytes, version_of

#: The largest image file that is read.
MAX_IMAGE_BYTES = 2**28
# Number of files that a thread checks at a time.
_CHUNK = 256
# Increase this number if `problem_of` refuses more images: they are cached as sound.
_VERSION = 2
# The cache key of a file that does not exist.
_NO_FILE = 0

logger = logging.getLogger(__name__)


def problem_of(image: object) -> str | None:
    """Return why an image cannot be decoded, or None if it can.

    A JPEG is decoded at an eighth of its size: this reads all of its bytes but computes few pixels.

    Args:
        image: image in one of the forms that `open_image` accepts.
    """
    if isinstance(image, bytes) and not image:
        return "it is empty"
    try:
        opened = open_image(image)
        opened.draft("RGB", (1, 1))
        opened.load()
    except UnidentifiedImageError:  # Pillow's message would only name an object in memory.
        return "it is not an image in a known format"
    except Exception as error:  # For a broken file, Pillow's decoders raise many types.
        return f"{type(error).__name__}: {str(error) or 'no reason given'}"
    return None


def sound_files(paths: Sequence[str], config: DataConfig, images: ImageConfig) -> np.ndarray:
    """Return bool[number of files], whether each file is an image that can be decoded.

    A file that passed the check is read again only if its size or modification time changes.

    Raises:
        ValueError: Some files are broken, and `images.on_broken` is 'refuse'.
    """
    keys = np.array([_key(path) for path in paths], np.uint64)
    folder = os.fsencode(os.path.commonpath(map(os.path.abspath, paths)))
    name = hashlib.sha256(folder).hexdigest()
    cache = config.cache_path / f"sound-images-{_VERSION}-{name[:16]}.array"
    # If several processes start together, the lock lets one of them check the files.
    with locked(cache):
        known = read_array(cache)
        known = np.zeros(0, np.uint64) if known is None else known
        unknown = np.flatnonzero(~np.isin(keys, known)).tolist()
        problems = find_problems(lambda i: _problem_of_file(paths[i]), unknown)
        is_sound = np.ones(len(paths), bool)
        is_sound[list(problems)] = False
        if len(unknown) > len(problems):
            sound_keys = keys[is_sound & (keys != _NO_FILE)]
            write_array(cache, np.unique(np.concatenate([known, sound_keys])))
    report(problems, len(paths), lambda i: paths[i], images)
    return is_sound


def report(
    problems: dict[int, str], count: int, place: Callable[[int], str], images: ImageConfig
) -> None:
    """Log the images that are left out, or refuse them.

    Args:
        problems: number of an image -> why it cannot be used.
        count: number of all images.
        place: returns where an image is stored.

    Raises:
        ValueError: There are problems, and `images.on_broken` is 'refuse'.
    """
    descriptions = [f"{place(i)} ({problems[i]})" for i in sorted(problems)]
    leave_out(descriptions, f"of {count} images cannot be used", "fix or remove them", images)


def leave_out(found: Sequence[str], what: str, remedy: str, images: ImageConfig) -> None:
    """Log the items that are left out, or refuse them. Does nothing if there are none.

    Args:
        found: description of each item.
        what: problem; in the message it follows the number of items.
        remedy: how to solve the problem.

    Raises:
        ValueError: There are items, and `images.on_broken` is 'refuse'.
    """
    if not found:
        return
    message = f"{len(found)} {what}: {first_names(found)}"
    if images.on_broken == "refuse":
        raise ValueError(f"{message}; {remedy}, or set images.on_broken='skip' to leave them out")
    logger.warning("%s; left out", message)


def find_problems(check: Callable[[int], str | None], numbers: Sequence[int]) -> dict[int, str]:
    """Check images in threads; return number of an image -> its problem, if it has one.

    Args:
        check: returns the problem of an image, or None if it has none.
    """
    if len(numbers) > 10 * _CHUNK:
        logger.info("Checking %d images; this is done once", len(numbers))

    def check_some(some: Sequence[int]) -> dict[int, str]:
        results = {int(i): check(int(i)) for i in some}
        return {i: problem for i, problem in results.items() if problem is not None}

    parts = [numbers[i : i + _CHUNK] for i in range(0, len(numbers), _CHUNK)]
    problems: dict[int, str] = {}
    # More threads than cores, because threads that read from a network disk mostly wait.
    with ThreadPoolExecutor(min(4 * (os.cpu_count() or 1), 64)) as threads:
        for part_problems in threads.map(check_some, parts):
            problems |= part_problems
    return problems


def _problem_of_file(path: str) -> str | None:
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is not a regular file"
    try:
        return problem_of(read_bytes(Path(path), max_bytes=MAX_IMAGE_BYTES))
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"
    except ValueError as error:
        return str(error)


def _key(path: str) -> int:
    """Hash the path, size and modification time of a file to a 64-bit key."""
    try:
        version = version_of(path)
    except OSError:
        return _NO_FILE
    content = os.fsencode(os.path.abspath(path)) + "\0{}\0{}".format(*version).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
