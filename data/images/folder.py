"""Image data sets stored as files, in one folder per class.

`data.paths` names one folder, in one of these layouts (or two, one for each split), or tables,
which data/images/tables.py unpacks into such folders:

    my_images/train/cat/1.jpg               my_images/cat/1.jpg
    my_images/train/dog/2.jpg       or      my_images/dog/2.jpg
    my_images/val/cat/3.jpg                 my_images/dog/3.jpg
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data.checks import first_names
from data.config import DataConfig
from data.examples import Label
from data.image_config import ImageConfig
from data.images.listing import ENDINGS, Listing, list_images, subfolders
from data.images.readability import MAX_IMAGE_BYTES, leave_out, sound_files
from data.images.sources import ImageDataset, ImageSource, Split
from data.images.transforms.crops import open_image
from data.images.unpack import unpack
from data.validation import naming_validation_paths, validation_sources
from untrusted.files import digest_of, read_bytes, version_of

# Names of folders that are splits rather than classes; upper and lower case are equivalent.
_TRAIN = "train"
_VALIDATION = ("val", "valid", "validation")
_OTHER = ("test",)
_SPLITS = {*_VALIDATION, *_OTHER}

logger = logging.getLogger(__name__)


class FolderImages(ImageSource):
    """Image files that are read on access.

    Args:
        files: bytes[number of images]: the paths relative to the folder.
        labels: int32[number of images]: the number of each image's class.
    """

    def __init__(self, root: Path, files: np.ndarray, labels: np.ndarray):
        self._root = str(root)
        self._files = files
        self._labels = labels
        # int64[number of images, 2]: size and modification time.
        self._versions = np.array([version_of(self.place(i)) for i in range(len(files))], np.int64)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return an image, not decoded yet, and the number of its class."""
        path = Path(self.place(index))
        content = read_bytes(path, max_bytes=MAX_IMAGE_BYTES)
        if version_of(path) != tuple(self._versions[index]):
            raise ValueError("it has changed since this run listed it")
        return open_image(content), int(self._labels[index])

    def place(self, index: int) -> str:
        """Return the path of an image."""
        return os.path.join(self._root, os.fsdecode(self._files[index]))


def find_image_folder(config: DataConfig, images: ImageConfig) -> ImageDataset:
    """Find the images of `data.paths`, without those that cannot be read.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder contains no images, fewer than two classes, or both splits and other
            folders; or `images.on_broken` is 'refuse', and there are broken files, classes without
            images, or validation classes that do not occur in training.
    """
    roots = split_folders(unpack(config))
    if config.validation_paths:
        roots = roots[:1]
    has_labels = config.objective == "image_classification"
    if has_labels:
        _check_classes(roots[0], subfolders(roots[0]))
    listings = [list_images(root, images) for root in roots]
    _check_none_empty(listings)
    if has_labels:
        # Check the classes before the slow part, which reads all files.
        listings = _with_images(_of_classes(listings), images)
    listings = _without_broken(listings, config, images)
    if has_labels:
        # Check them again: a class may have had only broken files.
        listings = _with_images(listings, images)
    _check_none_empty(listings)
    classes = listings[0].folders if has_labels else ()
    return ImageDataset(
        train=_split(listings[0], classes),
        validation=_split(listings[1], classes) if len(listings) > 1 else None,
        classes=classes,
        key=_key(listings, classes),
        contents=_key(listings, classes, is_full=True) if config.verify == "full" else "",
    )


def find_validation_folders(
    classes: Sequence[Label], config: DataConfig, images: ImageConfig
) -> dict[str, Split]:
    """Find the images of each set of `data.validation_paths`, by its name.

    Args:
        classes: classes of the training images, which folders are named after; empty if the
            objective needs no labels.

    Raises:
        FileNotFoundError: A folder does not exist.
        ValueError: A folder contains no usable images; or `images.on_broken` is 'refuse', and there
            are broken files, or classes that do not occur in training.
    """
    names = tuple(map(str, classes))
    with naming_validation_paths():
        sources = validation_sources(config)
        return {name: _validation_split(source, names, images) for name, source in sources.items()}


def validation_root(config: DataConfig) -> Path:
    """Return the folder of a validation set.

    Args:
        config: config of the set; see data/validation.py.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The set has several folders.
    """
    if len(config.paths) != 1:
        raise ValueError(
            f"data.paths={config.paths!r}: a validation set of images must be one folder; give "
            "each folder a name of its own, as in 'a=folder_a,b=folder_b'"
        )
    root = Path(unpack(config)[0]).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"data.paths: there is no folder {root} (in {Path.cwd()}); correct the path"
        )
    return root


def _validation_split(config: DataConfig, classes: Sequence[str], images: ImageConfig) -> Split:
    listing = list_images(validation_root(config), images)
    if classes:
        (listing,) = _of_classes([listing])
        lacking = sorted(set(listing.folders) - set(classes))
        what = f"of {len(listing.folders)} classes in {listing.root} do not occur in training"
        leave_out(list(map(repr, lacking)), what, "add training images of these classes", images)
        listing = listing.without_folders(lacking)
    _check_none_empty([listing])
    (listing,) = _without_broken([listing], config, images)
    _check_none_empty([listing])
    return _split(listing, classes)


def split_folders(paths: Sequence[str]) -> list[Path]:
    """Return the folder of the training images and, if there is one, of the validation images.

    Args:
        paths: `data.paths`, without tables and tars.

    Raises:
        FileNotFoundError: A folder does not exist.
        ValueError: The folder contains both splits and other folders.
    """
    roots = [Path(path).expanduser() for path in paths]
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(
                f"data.paths: there is no folder {root} (in {Path.cwd()}); correct the path"
            )
    if len(roots) == 2:
        return roots
    names = {name.casefold(): name for name in subfolders(roots[0])}
    others = sorted(name for key, name in names.items() if key not in {_TRAIN, *_SPLITS})
    # Without a "train" folder, the folders are classes. A class may be called "train" too: so they
    # are if there are other folders, but none with the name of another split.
    if _TRAIN not in names or (others and not names.keys() & _SPLITS):
        return roots
    if others:
        splits = sorted(set(names.values()).difference(others))
        raise ValueError(
            f"data.paths: {roots[0]} contains both the splits {first_names([*map(repr, splits)])} "
            f"and the other folders {first_names([*map(repr, others)])}; move these elsewhere, or "
            "set data.paths to the training folder and the validation folder"
        )
    split_names = [names[key] for key in (_TRAIN, *_VALIDATION) if key in names]
    return [roots[0] / name for name in split_names[:2]]


def _check_classes(root: Path, classes: Sequence[str]) -> None:
    if len(classes) < 2:
        what = f"only the folder {classes[0]!r} of images" if classes else "no folders of images"
        raise ValueError(
            f"data.paths: {root} contains {what}, but data.objective='image_classification' needs "
            "one folder of images for each of at least two classes; sort the images into folders, "
            "or choose an objective without labels (image_reconstruction, image_contrast)"
        )
    for name in classes:
        if os.fsencode(name).decode("utf-8", "replace") != name:
            raise ValueError(
                f"data.paths: {root} contains the class {os.fsencode(name)!r}, whose name is not "
                "UTF-8; rename the folder"
            )


def _check_none_empty(listings: Sequence[Listing]) -> None:
    for listing in listings:
        if not len(listing.files):
            raise ValueError(
                f"data.paths: {listing.root} contains no usable images; add images whose names end "
                f"with one of {', '.join(ENDINGS)}"
            )


def _of_classes(listings: Sequence[Listing]) -> list[Listing]:
    """Drop files that are in no class folder."""
    class_listings = []
    for listing in listings:
        is_in = listing.of_folder >= 0
        if not is_in.all():
            count = np.count_nonzero(~is_in)
            logger.info(
                "%d image(s) in %s are in no class folder and are not used", count, listing.root
            )
        class_listings.append(listing.chosen(is_in))
    return class_listings


def _with_images(listings: Sequence[Listing], images: ImageConfig) -> list[Listing]:
    """Drop classes that have no images, and validation classes that do not occur in training.

    Raises:
        ValueError: There are such classes, and `images.on_broken` is 'refuse'; or fewer than two
            classes are left.
    """
    usable_listings = []
    for listing in listings:
        counts = np.bincount(listing.of_folder, minlength=len(listing.folders))
        empty = [name for name, count in zip(listing.folders, counts, strict=True) if not count]
        what = f"of {len(counts)} classes in {listing.root} have no images"
        remedy = "add images, remove the folders"
        leave_out(list(map(repr, empty)), what, remedy, images)
        usable_listings.append(listing.without_folders(empty))
    train, *validation = usable_listings
    if len(train.folders) < 2 <= len(listings[0].folders):
        raise ValueError(
            f"data.paths: of {len(listings[0].folders)} classes in {train.root} only "
            f"{len(train.folders)} has usable images, but data.objective='image_classification' "
            "needs at least two; add images"
        )
    for i, listing in enumerate(validation):
        lacking = sorted(set(listing.folders) - set(train.folders))
        what = f"of {len(listing.folders)} classes in {listing.root} do not occur in {train.root}"
        remedy = "add training images of these classes"
        leave_out(list(map(repr, lacking)), what, remedy, images)
        validation[i] = listing.without_folders(lacking)
    return [train, *validation]


def _without_broken(
    listings: Sequence[Listing], config: DataConfig, images: ImageConfig
) -> list[Listing]:
    """Drop files that cannot be read."""
    is_sound = sound_files([path for listing in listings for path in listing.paths], config, images)
    bounds = np.cumsum([len(listing.files) for listing in listings])[:-1]
    parts = np.split(is_sound, bounds)
    return [listing.chosen(is_kept) for listing, is_kept in zip(listings, parts, strict=True)]


def _split(listing: Listing, classes: Sequence[str]) -> Split:
    labels = _labels(listing, classes)
    source = FolderImages(listing.root, listing.files, labels)
    return Split(source=source, names=listing.files, labels=labels)


def _labels(listing: Listing, classes: Sequence[str]) -> np.ndarray:
    """Return int32[number of images]: the number of each image's class.

    For objectives without labels `classes` is empty. Each subfolder then counts as a class, and so
    do the images in no subfolder, so that the validation split is a fraction of each.
    """
    if not classes:
        return listing.of_folder + 1
    number = {name: i for i, name in enumerate(classes)}
    return np.array([number[name] for name in listing.folders], np.int32)[listing.of_folder]


def _key(listings: Sequence[Listing], classes: Sequence[str], *, is_full: bool = False) -> str:
    """Hash relative paths, sizes or contents, and classes; copies of a folder have the same key."""
    digest = hashlib.sha256()
    for listing in listings:
        digest.update(f"{len(listing.files)}\0".encode())
        labels = _labels(listing, classes)
        for file, path, label in zip(listing.files, listing.paths, labels, strict=True):
            version = digest_of(Path(path)) if is_full else os.stat(path).st_size
            digest.update(bytes(file) + f"\0{version}\0{label}\0".encode())
    return digest.hexdigest()
