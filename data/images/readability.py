"""Which images can be read: asked once of each, before the first step."""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from data.array_cache import locked, read_array, write_array
from data.checks import listed
from data.config import DataConfig
from data.image_config import ImageConfig
from data.images.transforms.crops import open_image

# Files a thread takes at a time.
_CHUNK = 256
# The key of a file that is not there.
_NO_FILE = 0

logger = logging.getLogger(__name__)


def problem_of(image: object) -> str | None:
    """Returns why an image cannot be read, or None if it can.

    A JPEG is decoded at an eighth of its size: all of its bytes are read, few pixels computed.
    """
    if isinstance(image, bytes) and not image:
        return "it is empty"
    try:
        opened = open_image(image)
        opened.draft("RGB", (1, 1))
        opened.load()
    except UnidentifiedImageError:  # Which names an object in memory.
        return "it is no image of a known kind"
    except Exception as error:  # Of a broken file Pillow raises whatever its decoder stumbles on.
        return f"{type(error).__name__}: {str(error) or 'no reason given'}"
    return None


def sound_files(paths: Sequence[str], config: DataConfig, images: ImageConfig) -> np.ndarray:
    """Returns bool[number of files]: which are images that can be read.

    A file that was found sound is not read again while it keeps its size and its time.

    Raises:
        ValueError: Some are broken, and `images.on_broken` does not skip them.
    """
    keys = np.array([_key(path) for path in paths], np.uint64)
    folder = os.fsencode(os.path.commonpath(map(os.path.abspath, paths)))
    name = hashlib.sha256(folder).hexdigest()
    cache = config.cache_path / f"sound-images-{name[:16]}.npy"
    # Processes that start together check a file once.
    with locked(cache):
        known = read_array(cache)
        known = np.zeros(0, np.uint64) if known is None else known
        unknown = np.flatnonzero(~np.isin(keys, known)).tolist()
        problems = find_problems(lambda i: _problem_of_file(paths[i]), unknown)
        is_sound = np.ones(len(paths), bool)
        is_sound[list(problems)] = False
        if len(unknown) > len(problems):
            found = keys[is_sound & (keys != _NO_FILE)]
            write_array(cache, np.unique(np.concatenate([known, found])))
    report(problems, len(paths), lambda i: paths[i], images)
    return is_sound


def report(
    problems: dict[int, str], count: int, place: Callable[[int], str], images: ImageConfig
) -> None:
    """Logs which images are not used.

    Args:
        problems: Why, by number.
        count: Of all images.
        place: Returns where an image lies.
        images: What becomes of them.

    Raises:
        ValueError: There are some, and `images.on_broken` does not skip them.
    """
    found = [f"{place(i)} ({problems[i]})" for i in sorted(problems)]
    leave_out(found, f"of {count} images cannot be used", "mend them or take them away", images)


def leave_out(found: Sequence[str], what: str, remedy: str, images: ImageConfig) -> None:
    """Logs what of the data is left out.

    Args:
        found: A name of each thing.
        what: Follows their number in the message: what is wrong with them.
        remedy: What to do about them.
        images: What becomes of them.

    Raises:
        ValueError: There are some, and `images.on_broken` does not skip them.
    """
    if not found:
        return
    message = f"{len(found)} {what}: {listed(found)}"
    if images.on_broken == "refuse":
        raise ValueError(f"{message}; {remedy}, or set images.on_broken='skip' to leave them out")
    logger.warning("%s; left out", message)


def find_problems(check: Callable[[int], str | None], numbers: Sequence[int]) -> dict[int, str]:
    """Returns the problem of each image that has one, which threads ask for."""
    if len(numbers) > 10 * _CHUNK:
        logger.info("checking %d images; this is done once", len(numbers))

    def check_some(some: Sequence[int]) -> dict[int, str]:
        found = {int(i): check(int(i)) for i in some}
        return {i: problem for i, problem in found.items() if problem is not None}

    parts = [numbers[i : i + _CHUNK] for i in range(0, len(numbers), _CHUNK)]
    problems: dict[int, str] = {}
    # More threads than cores: of a network's disk they mostly wait.
    with ThreadPoolExecutor(min(4 * (os.cpu_count() or 1), 64)) as threads:
        for found in threads.map(check_some, parts):
            problems |= found
    return problems


def _problem_of_file(path: str) -> str | None:
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is no regular file"  # Reading a pipe would wait for ever.
    try:
        return problem_of(Path(path).read_bytes())
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"


def _key(path: str) -> int:
    """Returns a number that tells this state of the file from others."""
    try:
        status = os.stat(path)
    except OSError:
        return _NO_FILE
    told = f"\0{status.st_size}\0{status.st_mtime_ns}".encode()
    content = os.fsencode(os.path.abspath(path)) + told
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
