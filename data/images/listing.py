"""Files of images below a folder, by class."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.image_config import ImageConfig
from data.images.readability import leave_out

#: Endings of the files that are taken for images, in any case.
ENDINGS = (*(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"),)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Images below a folder.

    Attributes:
        root: The folder.
        files: bytes[number of images]: their paths below it, sorted.
        folders: The folders right in it, sorted: the classes, where there are some.
    """

    root: Path
    files: np.ndarray
    folders: tuple[str, ...]

    @property
    def of_folder(self) -> np.ndarray:
        """int32[number of images]: in which of `folders` each lies; -1: in none."""
        number = {os.fsencode(name): i for i, name in enumerate(self.folders)}
        tops = (os.path.dirname(bytes(file)).partition(os.sep.encode())[0] for file in self.files)
        return np.array([number.get(top, -1) for top in tops], np.int32)

    @property
    def paths(self) -> list[str]:
        """Those of the files."""
        return [os.path.join(self.root, os.fsdecode(file)) for file in self.files]

    def chosen(self, is_chosen: np.ndarray) -> "Listing":
        """Returns the listing with some of its files alone; bool[number of images]."""
        return replace(self, files=self.files[is_chosen])

    def without_folders(self, names: Sequence[str]) -> "Listing":
        """Returns the listing without some of `folders`, and what lies in them."""
        is_left = np.array([name not in names for name in self.folders], bool)
        # Where a file lies in no folder, its number picks the last entry: it stays.
        kept = self.chosen(np.append(is_left, True)[self.of_folder])
        return replace(kept, folders=tuple(np.array(self.folders, object)[is_left]))


def list_images(root: Path, images: ImageConfig) -> Listing:
    """Returns the images below a folder; hidden files and folders are passed over.

    Raises:
        ValueError: A folder cannot be read, or leads back to one it lies in, and
            `images.on_broken` does not skip it.
    """
    files, others, problems = [], [], []
    # (device, inode) of a folder and of those it lies in.
    above = {str(root): {_identity(str(root))}}

    def refuse(error: OSError) -> None:
        problems.append(f"{error.filename} ({error.strerror})")

    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        outer, entered = above.pop(folder), []
        for name in sorted(_shown(folders)):
            path = os.path.join(folder, name)
            own = _identity(path)
            if own in outer:
                problems.append(f"{path} (it leads back to a folder it lies in)")
            else:
                entered.append(name)
                above[path] = outer | {own}
        folders[:] = entered
        below = os.path.relpath(folder, root)
        prefix = "" if below == "." else below + os.sep
        for name in _shown(names):
            (files if name.lower().endswith(ENDINGS) else others).append(prefix + name)
    leave_out(problems, f"folder(s) below {root} unread", "mend them or take them away", images)
    if others:
        some = ", ".join(sorted(others)[:3])
        logger.info("%d file(s) in %s are no images by their names: %s", len(others), root, some)
    encoded = np.array([os.fsencode(file) for file in sorted(files)], np.bytes_)
    return Listing(root=root, files=encoded, folders=subfolders(root))


def subfolders(root: Path) -> tuple[str, ...]:
    """Returns the names of the folders right in a folder that are not hidden, sorted."""
    with os.scandir(root) as entries:
        return tuple(sorted(_shown([entry.name for entry in entries if entry.is_dir()])))


def _shown(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
