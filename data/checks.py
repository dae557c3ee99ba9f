"""Helpers that config sections use to validate their fields and to word their messages."""

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from untrusted.files import digest_of, version_of


def require(holds: object, message: str) -> None:
    """Raise a ValueError with this message unless `holds` is true."""
    if not holds:
        raise ValueError(message)


def is_int(value: object) -> TypeGuard[int]:
    """Return whether the value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def first_names(found: Sequence[str], most: int = 3) -> str:
    """Join the first `most` strings with commas, and append how many more there are.

    For example, `first_names(["a", "b", "c", "d", "e"])` is `"a, b, c and 2 more"`.
    """
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def matches_of(pattern: str) -> list[str]:
    """Return the paths that a glob of a config matches, in any order.

    Names come first: if there is a file `data[1].txt`, the pattern of this name matches this file
    and not `data1.txt`. Likewise, `runs[1]/*.txt` matches files of the folder `runs[1]`, if there
    is one.

    A `**` matches any number of folders, so a second one directly after it adds nothing. It is
    dropped, because the time of glob.glob grows exponentially with their number.
    """
    parts = Path(pattern).expanduser().parts
    num_names = 0  # how many of the first parts are names of files and folders that exist
    while num_names < len(parts) and os.path.exists(Path(*parts[: num_names + 1])):
        num_names += 1
    names = Path(*parts[:num_names])
    if num_names == len(parts):
        return [str(names)]
    pattern_parts = parts[num_names:]
    pairs = zip(("", *pattern_parts), pattern_parts, strict=False)
    glob_parts = [part for previous, part in pairs if not previous == part == "**"]
    return glob.glob(str(Path(glob.escape(str(names)), *glob_parts)), recursive=True)


def files_key(files: list[Path], verify: str) -> str:
    """Hash the paths of files, with either their contents or their sizes and modification times.

    Args:
        verify: config key `data.verify`: "times" for sizes and modification times, "full" for
            the contents.
    """
    digest = hashlib.sha256()
    for file in files:
        version = digest_of(file) if verify == "full" else "{}\0{}".format(*version_of(file))
        digest.update(f"{file.resolve()}\0{version}\0".encode())
    return digest.hexdigest()
