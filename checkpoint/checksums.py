"""Stores SHA-256 checksums in each checkpoint, to detect damage before it is restored.

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

from checkpoint.layout import CONFIG
from untrusted.files import digest_of, read_text

CHECKSUMS_FILE = "checksums.sha256"


def write_checksums(directory: Path) -> None:
    """Write `checksums.sha256` for `config.yaml` and all files in subdirectories of a checkpoint.

    Other files directly in `directory` are left out: Orbax may still write its time stamps there,
    and restoring does not need them.

    Args:
        directory: a checkpoint whose other files are complete.
    """
    names = sorted(
        path.relative_to(directory).as_posix()
        for item in directory.iterdir()
        if item.is_dir() or item.name == CONFIG
        for path in (item, *item.rglob("*"))
        if path.is_file()
    )
    with open(directory / CHECKSUMS_FILE, "w") as file:
        # The number of files reveals a list that was truncated between two lines. sha256sum
        # ignores this line.
        file.write(f"# {len(names)} files\n")
        for name, digest in zip(names, _digests(directory, names), strict=True):
            file.write(f"{digest}  {name}\n")
        file.flush()
        os.fsync(file.fileno())


def find_damage(directory: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Compare the files of a checkpoint with their checksums.

    Several processes can share the reading: each checks one of `num_parts` parts of the files.

    Args:
        directory: a checkpoint.
        part: the part of the files to check, from 0 to `num_parts - 1`.
        num_parts: the number of parts.

    Returns:
        One sentence that names the first damaged file, or None if all files are intact.
    """
    try:
        expected = _read_list(directory)
    except ValueError as error:
        return str(error)
    return _compare(directory, expected, sorted(expected)[part::num_parts])


def find_damage_of_config(directory: Path) -> str | None:
    """Compare only `config.yaml` of a checkpoint with its checksum.

    Args:
        directory: a checkpoint.

    Returns:
        One sentence that describes the damage; or None if the config is intact, or if the
        checkpoint is older and has no checksum of it.
    """
    try:
        expected = _read_list(directory)
    except ValueError as error:
        return str(error)
    return _compare(directory, expected, [CONFIG] if CONFIG in expected else [])


def find_missing(directory: Path) -> str | None:
    """Check that all files of a checkpoint exist, without reading them.

    Args:
        directory: a checkpoint.

    Returns:
        One sentence that names the first missing file, or None if all files exist.
    """
    try:
        names = sorted(_read_list(directory))
    except ValueError as error:
        return str(error)
    missing = (name for name in names if not (directory / name).is_file())
    return next((f"{name} is missing" for name in missing), None)


def _compare(directory: Path, expected: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return one sentence that names the first of the files that is damaged, or None."""
    for name, digest in zip(names, _digests(directory, names), strict=True):
        if digest is None:
            return f"{name} is missing or cannot be read"
        if digest != expected[name]:
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


def _read_list(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name.

    Raises:
        ValueError: the list is missing or damaged; the message is a complete sentence.
    """
    try:
        head, *lines = read_text(directory / CHECKSUMS_FILE, within=directory).splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise ValueError(f"{CHECKSUMS_FILE} is missing or cannot be read") from None
    if head != f"# {len(expected)} files":
        raise ValueError(
            f"{CHECKSUMS_FILE} has changed since it was written (it lists {len(expected)} files)"
        )
    return expected


def _digests(directory: Path, names: Sequence[str]) -> list[str | None]:
    """Return the SHA-256 of each file in hex, or None for a file that cannot be read."""

    def digest(name: str) -> str | None:
        try:
            return digest_of(directory / name, within=directory)
        except (OSError, ValueError):
            return None

    # hashlib releases the GIL, so threads hash in parallel and do not block a running training
    # loop. Only four of them, to leave it most of the cores.
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(digest, names))
