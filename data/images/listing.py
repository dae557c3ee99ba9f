"""Recursive listings of the image files in a folder, grouped by its subfolders."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.image_config import ImageConfig
from data.images.readability import leave_out

#: Suffixes of the files that are read as images; upper and lower case are equivalent.
ENDINGS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
    ".gif",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The image files in a folder and its subfolders.

    Attributes:
        root: The folder.
        files: bytes[number of images]: the paths relative to the folder, sorted.
        folders: The names of the immediate subfolders, sorted. If images are sorted by class, these
            are the classes.
    """

    root: Path
    files: np.ndarray
    folders: tuple[str, ...]

    @property
    def of_folder(self) -> np.ndarray:
        """int32[number of images]: the index in `folders` of each file; -1 if it is in none."""
        number = {os.fsencode(name): i for i, name in enumerate(self.folders)}
        tops = (os.path.dirname(bytes(file)).partition(os.sep.encode())[0] for file in self.files)
        return np.array([number.get(top, -1) for top in tops], np.int32)

    @property
    def paths(self) -> list[str]:
        """The full paths of the files."""
        return [os.path.join(self.root, os.fsdecode(file)) for file in self.files]

    def chosen(self, is_chosen: np.ndarray) -> "Listing":
        """Keep some of the files.

        Args:
            is_chosen: bool[number of images].

        Returns:
            The listing of the chosen files.
        """
        return replace(self, files=self.files[is_chosen])

    def without_folders(self, names: Sequence[str]) -> "Listing":
        """Drop some of `folders`, and the files in them.

        Args:
            names: The names of the folders to drop.

        Returns:
            The listing of the remaining folders and files.
        """
        is_left = np.array([name not in names for name in self.folders], bool)
        # A file in no folder has index -1, which selects the appended True: the file is kept.
        kept = self.chosen(np.append(is_left, True)[self.of_folder])
        return replace(kept, folders=tuple(np.array(self.folders, object)[is_left]))


def list_images(root: Path, images: ImageConfig) -> Listing:
    """List the images in a folder and its subfolders. Hidden files and folders are ignored.

    Symbolic links to folders are followed.

    Args:
        root: The folder.
        images: The config section `images`, whose `on_broken` says what to do about problems.

    Returns:
        The listing.

    Raises:
        ValueError: A folder cannot be read, or links back to a folder that contains it, and
            `images.on_broken` is 'refuse'.
    """
    files = []
    others = []
    problems = []
    # Path of a folder -> (device, inode) of the folder and of all folders that contain it. A folder
    # whose own identity is in this set is a cycle.
    above = {str(root): {_identity(str(root))}}

    def refuse(error: OSError) -> None:
        problems.append(f"{error.filename} ({error.strerror})")

    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        outer = above.pop(folder)
        entered = []
        for name in sorted(_shown(folders)):
            path = os.path.join(folder, name)
            own = _identity(path)
            if own in outer:
                problems.append(f"{path} (it leads back to a folder that contains it)")
            else:
                entered.append(name)
                above[path] = outer | {own}
        folders[:] = entered
        below = os.path.relpath(folder, root)
        prefix = "" if below == "." else below + os.sep
        for name in _shown(names):
            (files if name.lower().endswith(ENDINGS) else others).append(prefix + name)
    leave_out(problems, f"folder(s) in {root} cannot be read", "fix or remove them", images)
    if others:
        some = ", ".join(sorted(others)[:3])
        logger.info("%d file(s) in %s have no image suffix: %s", len(others), root, some)
    encoded = np.array([os.fsencode(file) for file in sorted(files)], np.bytes_)
    return Listing(root=root, files=encoded, folders=subfolders(root))


def subfolders(root: Path) -> tuple[str, ...]:
    """Return the sorted names of the immediate subfolders that are not hidden."""
    with os.scandir(root) as entries:
        return tuple(sorted(_shown([entry.name for entry in entries if entry.is_dir()])))


def _shown(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
