"""Which images can be read: asked once of each, before the first step."""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import numpy as np

from data.config import DataConfig
from data.crops import open_image
from data.image_config import ImageConfig

# So many broken images are named.
_NUM_NAMED = 3
# Files a thread takes at a time.
_CHUNK = 256

logger = logging.getLogger(__name__)


def problem_of(image: object) -> str | None:
    """Returns why an image cannot be read, or None if it can.

    A JPEG is decoded at an eighth of its size: all of its bytes are read, few pixels computed.
    """
    try:
        opened = open_image(image)
        opened.draft("RGB", (1, 1))
        opened.load()
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
    name = hashlib.sha256(os.path.commonpath(map(os.path.abspath, paths)).encode()).hexdigest()
    cache = config.cache_path / f"sound-images-{name[:16]}.npy"
    # Processes that start together check a file once.
    with filelock.FileLock(f"{cache}.lock"):
        known = np.load(cache) if cache.exists() else np.zeros(0, np.uint64)
        unknown = np.flatnonzero(~np.isin(keys, known))
        if len(unknown) > 10 * _CHUNK:
            logger.info("checking %d images; this is done once", len(unknown))
        problems = _in_threads(lambda i: problem_of(_read(paths[i])), unknown)
        is_sound = np.ones(len(paths), bool)
        is_sound[list(problems)] = False
        if len(unknown) > len(problems):
            _save(cache, np.unique(np.concatenate([known, keys[is_sound]])))
    report(problems, len(paths), lambda i: paths[i], images)
    return is_sound


def report(
    problems: dict[int, str], count: int, place: Callable[[int], str], images: ImageConfig
) -> None:
    """Logs which images are broken.

    Args:
        problems: Why, by number.
        count: Of all images.
        place: Returns where an image lies.
        images: What becomes of them.

    Raises:
        ValueError: There are some, and `images.on_broken` does not skip them.
    """
    if not problems:
        return
    named = [f"{place(i)} ({problems[i]})" for i in sorted(problems)[:_NUM_NAMED]]
    more = f" and {len(problems) - len(named)} more" if len(problems) > len(named) else ""
    what = f"{len(problems)} of {count} images cannot be read: {', '.join(named)}{more}"
    if images.on_broken == "refuse":
        raise ValueError(
            f"{what}; mend them or take them away, or set images.on_broken='skip' to leave them out"
        )
    logger.warning("%s; they are left out", what)


def _in_threads(check: Callable[[int], str | None], numbers: np.ndarray) -> dict[int, str]:
    """Returns the problem of each image that has one."""

    def check_some(some: np.ndarray) -> dict[int, str]:
        found = {int(i): check(int(i)) for i in some}
        return {i: problem for i, problem in found.items() if problem is not None}

    parts = [numbers[i : i + _CHUNK] for i in range(0, len(numbers), _CHUNK)]
    problems: dict[int, str] = {}
    # More threads than cores: of a network's disk they mostly wait.
    with ThreadPoolExecutor(min(4 * (os.cpu_count() or 1), 64)) as threads:
        for found in threads.map(check_some, parts):
            problems |= found
    return problems


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"data.paths: {path} cannot be read: {error.strerror}") from error


def _key(path: str) -> int:
    status = os.stat(path)
    told = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big")


def _save(cache: Path, keys: np.ndarray) -> None:
    new = cache.with_suffix(".tmp.npy")
    np.save(new, keys)
    os.replace(new, cache)
