"""SHA-256 sums that lie inside a checkpoint, so that damage is found before anything is read.

Orbax checks its own index files only: a flipped byte in an array's data, or in a JSON file, comes
back as a wrong number without a word. The sums are in the format of coreutils, so
`sha256sum --check checksums.sha256` verifies a checkpoint by hand.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS_FILE = "checksums.sha256"


def write_checksums(directory: Path) -> None:
    """Writes `checksums.sha256`, naming every file in the subdirectories of `directory`.

    Files at the top are left out: Orbax still writes its time stamps there, and reading does
    not need them.
    """
    names = sorted(
        path.relative_to(directory).as_posix()
        for item in directory.iterdir()
        if item.is_dir()
        for path in item.rglob("*")
        if path.is_file()
    )
    with open(directory / CHECKSUMS_FILE, "w") as file:
        # The count shows a list that was cut off between two lines; sha256sum skips it.
        file.write(f"# {len(names)} files\n")
        for name, digest in zip(names, _digests(directory, names), strict=True):
            file.write(f"{digest}  {name}\n")
        file.flush()
        os.fsync(file.fileno())


def find_damage(directory: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Returns one sentence that names the first damaged file, or None if all are as written.

    Args:
        directory: a checkpoint, as `write_checksums` left it.
        part: which share of the files to look at, from 0 to `num_parts - 1`, so that several
            processes share the reading.
        num_parts: the number of shares.
    """
    try:
        expected = _read_list(directory)
    except ValueError as error:
        return str(error)
    names = sorted(expected)[part::num_parts]
    for name, digest in zip(names, _digests(directory, names), strict=True):
        if digest is None:
            return f"{name} is missing or cannot be read"
        if digest != expected[name]:
            return f"{name} is not what was written (its SHA-256 differs)"
    return None


def find_missing(directory: Path) -> str | None:
    """Returns one sentence that names the first missing file, or None; it reads none but the list.

    Args:
        directory: a checkpoint, as `write_checksums` left it.
    """
    try:
        names = sorted(_read_list(directory))
    except ValueError as error:
        return str(error)
    missing = (name for name in names if not (directory / name).is_file())
    return next((f"{name} is missing" for name in missing), None)


def _read_list(directory: Path) -> dict[str, str]:
    """Returns name -> SHA-256; raises ValueError, which says it all, if the list is damaged."""
    try:
        head, *lines = (directory / CHECKSUMS_FILE).read_text().splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise ValueError(f"{CHECKSUMS_FILE} is missing or cannot be read") from None
    if head != f"# {len(expected)} files":
        raise ValueError(
            f"{CHECKSUMS_FILE} is not what was written (it lists {len(expected)} files)"
        )
    return expected


def _digests(directory: Path, names: Sequence[str]) -> list[str | None]:
    """Returns each file's SHA-256 in hex, None where it cannot be read."""

    def digest(name: str) -> str | None:
        try:
            with open(directory / name, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError):
            return None

    # hashlib lets go of the interpreter's lock, so threads share the work and a training loop
    # that runs meanwhile keeps going; few of them, to leave it the cores.
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(digest, names))
