"""Finds damage in a checkpoint before it is restored: by SHA-256 checksums that are stored in it.

Orbax verifies its own index files only. A flipped byte in an array's data or in a JSON file would
silently restore as a wrong number. The checksum file has the format of coreutils, so you can verify
a checkpoint by hand with `sha256sum --check checksums.sha256`:

    # 3 files
    <SHA-256 in hex>  config.yaml
    <SHA-256 in hex>  data_state/metadata
    <SHA-256 in hex>  state/manifest.ocdbt

Lists written by older versions lack `config.yaml`; then it is not compared.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from checkpoint.arrays import find_damage_of_arrays
from checkpoint.errors import ReadError, is_file, read_patiently
from checkpoint.layout import CONFIG, DATA_STATE, MANIFEST, STRUCTURE
from untrusted.files import digest_of, read_text

CHECKSUMS_FILE = "checksums.sha256"


def write_checksums(directory: Path) -> None:
    """Write `checksums.sha256` for `config.yaml` and all files in subdirectories of a checkpoint.

    Other files directly in `directory` are left out: Orbax may still write its time stamps there,
    and restoring does not need them.

    Args:
        directory: checkpoint whose other files are complete.

    Raises:
        OSError: a file cannot be written, or cannot be read back.
    """
    names = _covered_files(directory)
    digests = _digests(directory, names)
    with open(directory / CHECKSUMS_FILE, "w") as file:
        # The number of files reveals a list that was truncated between two lines. sha256sum
        # ignores this line.
        file.write(f"# {len(names)} files\n")
        for name, digest in zip(names, digests, strict=True):
            if digest is None:
                raise OSError(f"{name} was removed or replaced during the save")
            file.write(f"{digest}  {name}\n")
        file.flush()
        os.fsync(file.fileno())


def find_damage(directory: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Compare the files of a checkpoint with their checksums, and check its arrays.

    Several processes can share the reading: each checks one of `num_parts` parts of the files, and
    the first one also checks that the list of checksums is complete, and that the arrays are those
    that the checkpoint lists.

    Args:
        part: part of the files to check, from 0 to `num_parts - 1`.

    Returns:
        One sentence that names the first damaged file, or None if all files are intact.

    Raises:
        ReadError: a file cannot be read, so it is unknown whether it is intact.
        ValueError: no checkpoint can be stored in this directory; see `check_path`.
    """
    try:
        expected = _read_list(directory)
    except _Damaged as error:
        return str(error)
    damage = _compare(directory, expected, sorted(expected)[part::num_parts])
    if damage is not None or part > 0:
        return damage
    return _find_unlisted(directory, expected) or find_damage_of_arrays(directory)


def find_damage_of_config(directory: Path) -> str | None:
    """Compare only `config.yaml` of a checkpoint with its checksum.

    Returns:
        One sentence that describes the damage; or None if the config is intact, or if the
        checkpoint is older and has no checksum of it.

    Raises:
        ReadError: a file cannot be read, so it is unknown whether it is intact.
    """
    try:
        expected = _read_list(directory)
    except _Damaged as error:
        return str(error)
    return _compare(directory, expected, [CONFIG] if CONFIG in expected else [])


def find_missing(directory: Path) -> str | None:
    """Return a sentence about the first missing file, or None if all exist; no contents are read.

    Raises:
        ReadError: a file cannot be read.
    """
    try:
        expected = _read_list(directory)
    except _Damaged as error:
        return str(error)
    missing = (name for name in sorted(expected) if not is_file(directory / name))
    damage = next((f"{name} is missing" for name in missing), None)
    return damage or _find_unlisted(directory, expected)


class _Damaged(Exception):
    """The list of checksums is missing or damaged; the message is a complete sentence."""


def _compare(directory: Path, expected: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return one sentence that names the first of the files that is damaged, or None."""
    for name, digest in zip(names, _digests(directory, names), strict=True):
        if digest is None:
            return f"{name} is missing or not a regular file"
        if digest != expected[name]:
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


def _read_list(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name.

    Raises:
        _Damaged: the list is missing, damaged or incomplete.
        ReadError: the list cannot be read.
    """
    file = directory / CHECKSUMS_FILE
    try:
        head, *lines = read_patiently(file, lambda: read_text(file, within=directory)).splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except ReadError:
        raise
    except (OSError, ValueError):
        raise _Damaged(f"{CHECKSUMS_FILE} is missing or not a list of checksums") from None
    if head != f"# {len(expected)} files":
        raise _Damaged(
            f"{CHECKSUMS_FILE} has changed since it was written (it lists {len(expected)} files)"
        )
    for name in (STRUCTURE, MANIFEST, DATA_STATE):
        if name not in expected:
            raise _Damaged(f"{CHECKSUMS_FILE} does not list {name}, which every checkpoint has")
    return expected


def _find_unlisted(directory: Path, expected: Mapping[str, str]) -> str | None:
    """Return a sentence about a file that belongs to the checkpoint, but has no checksum, or None.

    `config.yaml` is not considered, because older versions did not list it, nor are hidden files,
    such as those that NFS leaves in place of deleted ones.
    """
    try:
        names = read_patiently(directory, lambda: _covered_files(directory))
    except FileNotFoundError as error:
        return f"{error.filename} was deleted while it was read"
    unlisted = (
        name
        for name in names
        if name not in expected and name != CONFIG and not Path(name).name.startswith(".")
    )
    return next((f"{CHECKSUMS_FILE} does not list {name}" for name in unlisted), None)


def _covered_files(directory: Path) -> list[str]:
    """Return the names of the files of a checkpoint that its list of checksums covers.

    Raises:
        OSError: a directory cannot be listed; `Path.rglob` would leave its files out.
    """

    def stop(error: OSError) -> NoReturn:
        raise error

    names = []
    for parent, _, files in os.walk(directory, onerror=stop):
        if parent == str(directory):
            files = [CONFIG] if CONFIG in files else []
        names += [file for name in files if is_file(file := Path(parent, name))]
    return sorted(file.relative_to(directory).as_posix() for file in names)


def _digests(directory: Path, names: Sequence[str]) -> list[str | None]:
    """Return the SHA-256 of each file in hex, or None if there is no such regular file.

    Raises:
        ReadError: a file cannot be read.
    """

    def digest(name: str) -> str | None:
        file = directory / name
        try:
            return read_patiently(file, lambda: digest_of(file, within=directory))
        except ReadError:
            raise
        except (OSError, ValueError):
            return None

    # hashlib releases the GIL, so threads hash in parallel and do not block a running training
    # loop. Only four of them, to leave it most of the cores.
    pool = ThreadPoolExecutor(max_workers=4)
    try:
        return list(pool.map(digest, names))
    finally:
        # After an error, the other files need not be read.
        pool.shutdown(cancel_futures=True)
