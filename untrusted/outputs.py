"""Checks that a result can be written, before the work that it is the result of."""

from pathlib import Path


def check_file(option: str, path: Path | None) -> None:
    """Check that a file can be written.

    Args:
        option: name of the option that names it, for the message.
        path: file; None: nothing is written.

    Raises:
        ValueError: It is a directory, or its directory does not exist.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}={path} is a directory; add the name of a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}={path}: the directory {path.parent} does not exist; create it")


def check_new_directory(path: Path | None) -> None:
    """Check that a directory can be created.

    Args:
        path: directory, which may exist if it is empty; None: nothing is written.

    Raises:
        ValueError: There is a file, or a directory that is not empty.
    """
    if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists and is not empty; choose another directory")
