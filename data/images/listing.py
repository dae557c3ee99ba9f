"""Recursive listings of the image files in a folder, grouped by its subfolders."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.checks import first_names
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
        files: bytes[number of images]: the paths relative to the folder, sorted.
        folders: names of the immediate subfolders, sorted. If images are sorted by class, these
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
        """
        return replace(self, files=self.files[is_chosen])

    def without_folders(self, names: Sequence[str]) -> "Listing":
        """Drop some of `folders`, and the files in them."""
        is_left = np.array([name not in names for name in self.folders], bool)
        # A file in no folder has index -1, which selects the appended True: the file is kept.
        listing = self.chosen(np.append(is_left, True)[self.of_folder])
        return replace(listing, folders=tuple(np.array(self.folders, object)[is_left]))


def list_images(root: Path, images: ImageConfig) -> Listing:
    """List the images in a folder and its subfolders. Hidden files and folders are ignored.

    Symbolic links are followed, but every image is listed once: a link to something that is listed
    anyway is left out, with a log message.

    Raises:
        ValueError: A folder cannot be read, or links back to a folder that contains `root`, and
            `images.on_broken` is 'refuse'.
    """
    walk = _Walk(root)
    leave_out(walk.problems, f"folder(s) in {root} cannot be read", "fix or remove them", images)
    files = [name for name in walk.files if name.lower().endswith(ENDINGS)]
    others = [name for name in walk.files if not name.lower().endswith(ENDINGS)]
    if others:
        some = ", ".join(sorted(others)[:3])
        logger.info("%d file(s) in %s have no image suffix: %s", len(others), root, some)
    if walk.repeated:
        some = first_names(sorted(walk.repeated))
        what = "lead to images that are listed anyway"
        logger.info("%d link(s) in %s %s: %s", len(walk.repeated), root, what, some)
    encoded = np.array([os.fsencode(file) for file in sorted(files)], np.bytes_)
    return Listing(root=root, files=encoded, folders=subfolders(root))


class _Walk:
    """A walk through a folder and its subfolders, which visits every file and folder once.

    Attributes:
        files: paths of the files, relative to the folder.
        repeated: relative paths of links to files and folders that are visited anyway.
        problems: descriptions of folders that cannot be entered.
    """

    def __init__(self, root: Path):
        self.files: list[str] = []
        self.repeated: list[str] = []
        self.problems: list[str] = []
        self._root = str(root)
        self._real_root = os.path.realpath(root)
        # (device, inode) of the folders entered, and of the files that links outside lead to.
        self._seen = {_identity(self._real_root)}
        waiting = [""]
        while waiting:
            waiting += self._enter(waiting.pop())

    def _enter(self, folder: str) -> list[str]:
        """Visit a folder by its relative path, and return its subfolders."""
        try:
            with os.scandir(os.path.join(self._root, folder) if folder else self._root) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            self.problems.append(f"{error.filename} ({error.strerror})")
            return []
        folders = []
        for entry in entries:
            name = os.path.join(folder, entry.name)
            if entry.name.startswith(".") or not self._is_new(entry, name):
                continue
            if entry.is_dir():
                folders.append(name)
            else:
                self.files.append(name)
        return folders

    def _is_new(self, entry: os.DirEntry[str], name: str) -> bool:
        """Return whether to visit an entry; if not, record the reason."""
        is_folder = entry.is_dir()
        if entry.is_symlink():
            real = os.path.realpath(entry.path)
            if is_folder and os.path.commonpath([real, self._real_root]) == real:
                self.problems.append(f"{entry.path} (it leads back to a folder that contains it)")
                return False
            if os.path.exists(real) and self._is_listed(real):
                self.repeated.append(name)
                return False
        if is_folder or (entry.is_symlink() and entry.is_file()):
            identity = _identity(entry.path)
            if identity in self._seen:
                self.repeated.append(name)
                return False
            self._seen.add(identity)
        return True

    def _is_listed(self, real: str) -> bool:
        """Return whether a path without links is in the folder, and not hidden there."""
        relative = os.path.relpath(real, self._real_root)
        return not any(part.startswith(".") for part in relative.split(os.sep))


def subfolders(root: Path) -> tuple[str, ...]:
    """Return the sorted names of the immediate subfolders that are not hidden."""
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return tuple(sorted(name for name in names if not name.startswith(".")))


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
