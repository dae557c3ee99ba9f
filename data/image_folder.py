"""Folders of image files, a folder for each class."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data.config import DataConfig
from data.crops import open_image
from data.image_check import sound_files
from data.image_config import ImageConfig
from data.image_sources import Found, ImageSource, Split

#: Endings of the files that are taken for images, in any case.
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Names of folders that are splits and no classes.
_TRAIN, _VALIDATION, _OTHER = "train", ("val", "validation"), ("test",)


class FolderImages(ImageSource):
    """Image files, read on access.

    Args:
        root: The folder they lie in.
        files: bytes[number of images]: their paths below it.
        labels: int32[number of images].
    """

    def __init__(self, root: Path, files: np.ndarray, labels: np.ndarray):
        self._root, self._files, self._labels = str(root), files, labels

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        content = Path(self.place(index)).read_bytes()
        return open_image(content), int(self._labels[index])

    def place(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._files[index]))


def find_image_folder(config: DataConfig, images: ImageConfig) -> Found:
    """Returns the images of `data.paths`, each file of which was found to be sound once.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It holds no images, or no classes, or a class of validation that training lacks,
            or files that are broken.
    """
    roots = _split_folders(config.paths)
    has_labels = config.objective == "image_classification"
    classes: tuple[str, ...] = ()
    if has_labels:
        classes = _find_classes(roots[0])
        _check_classes(roots, classes)
    tables = [_list_files(root, classes) for root in roots]
    for root, (files, _) in zip(roots, tables, strict=True):
        if not len(files):
            raise ValueError(
                f"data.paths: {root} holds no images; files must end with one of "
                f"{', '.join(ENDINGS)}"
            )
    tables = _without_broken(roots, tables, config, images)
    if has_labels:
        _check_none_empty(roots[0], tables[0][1], classes)
    splits = [_split(root, *table) for root, table in zip(roots, tables, strict=True)]
    return Found(
        train=splits[0],
        validation=splits[1] if len(splits) > 1 else None,
        classes=classes,
        key=_key(roots, tables),
    )


def _split_folders(paths: Sequence[str]) -> list[Path]:
    """Returns the folder of the training images, and that of the validation images, if any."""
    roots = [Path(path).expanduser() for path in paths]
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(
                f"data.paths: there is no folder {root} (in {Path.cwd()}); correct the path"
            )
    if len(roots) == 2:
        return roots
    names = set(_folders(roots[0]))
    # A class may be called "train" too, but not all beside it be splits.
    if _TRAIN not in names or names - {_TRAIN, *_VALIDATION, *_OTHER}:
        return roots
    found = [roots[0] / name for name in _VALIDATION if name in names]
    return [roots[0] / _TRAIN, *found[:1]]


def _folders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(name for name in names if not name.startswith("."))


def _find_classes(root: Path) -> tuple[str, ...]:
    classes = tuple(_folders(root))
    if len(classes) < 2:
        what = f"only the folder {classes[0]!r}" if classes else "no folders"
        raise ValueError(
            f"data.paths: {root} has {what} in it, but data.objective='image_classification' needs "
            "a folder of images for each of at least two classes; sort the images into folders, or "
            "learn without labels (image_reconstruction, image_contrast)"
        )
    return classes


def _check_classes(roots: Sequence[Path], classes: tuple[str, ...]) -> None:
    lacking = sorted(set(_folders(roots[1])) - set(classes)) if len(roots) > 1 else []
    if lacking:
        raise ValueError(
            f"data.paths: {roots[1]} has {_some(lacking)}, which {roots[0]} lacks; a class of "
            "validation must be one of training: add its images there, or take the folder away"
        )


def _list_files(root: Path, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the paths of all images below a folder, sorted, and the numbers of their classes.

    Without classes, those below each of its folders count as one.
    """
    number = {name: i for i, name in enumerate(classes or ["", *_folders(root)])}
    files = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(folder, root)
        below = "" if below == "." else below + os.sep
        files += [
            below + name
            for name in names
            if name.lower().endswith(ENDINGS) and not name.startswith(".")
        ]
    files.sort()
    tops = [file.partition(os.sep)[0] if os.sep in file else "" for file in files]
    is_of_class = [top in number for top in tops]
    labels = np.array([number[top] for top in tops if top in number], np.int32)
    encoded = [os.fsencode(file) for file, is_in in zip(files, is_of_class, strict=True) if is_in]
    return np.array(encoded, np.bytes_), labels


def _without_broken(
    roots: Sequence[Path],
    tables: Sequence[tuple[np.ndarray, np.ndarray]],
    config: DataConfig,
    images: ImageConfig,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tables with the files that can be read alone."""
    paths = [
        os.path.join(root, os.fsdecode(file))
        for root, (files, _) in zip(roots, tables, strict=True)
        for file in files
    ]
    is_sound = sound_files(paths, config, images)
    bounds = np.cumsum([len(files) for files, _ in tables])[:-1]
    return [
        (files[is_kept], labels[is_kept])
        for (files, labels), is_kept in zip(tables, np.split(is_sound, bounds), strict=True)
    ]


def _check_none_empty(root: Path, labels: np.ndarray, classes: Sequence[str]) -> None:
    counts = np.bincount(labels, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        raise ValueError(
            f"data.paths: {root} has no image in {_some(empty)}; put images there, or take the "
            "folder away"
        )


def _split(root: Path, files: np.ndarray, labels: np.ndarray) -> Split:
    # Paths must be the same on every system.
    names = [bytes(file).replace(os.sep.encode(), b"/") for file in files]
    return Split(source=FolderImages(root, files, labels), names=names, labels=lambda: labels)


def _key(roots: Sequence[Path], tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    """Returns a hash of paths, sizes and classes: a copy elsewhere has the same."""
    digest = hashlib.sha256()
    for root, (files, labels) in zip(roots, tables, strict=True):
        digest.update(f"{len(files)}\0".encode())
        for file, label in zip(files, labels, strict=True):
            size = os.stat(os.path.join(root, os.fsdecode(file))).st_size
            digest.update(bytes(file) + f"\0{size}\0{label}\0".encode())
    return digest.hexdigest()


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'the class' if len(names) == 1 else f'{len(names)} classes:'} {shown}{more}"
