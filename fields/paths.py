"""Checks paths that a user names: URLs are refused where only file systems are supported.

Without this check, `Path("gs://bucket/run")` is the local folder `gs:/bucket/run`: a run would
appear to write to a bucket, and its files would be lost with the machine.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from fields.numbers import shown

#: `s3://bucket/x`, `gs:/bucket/x` (the same as a Path), and chains such as `zip::s3://x.zip`.
#: A scheme has at least two characters and no dot, so `config.py:/argument` is none.
_URL = re.compile(r"(?:[A-Za-z][\w+-]+::)*([A-Za-z][A-Za-z0-9+-]+):/+(.*)", re.DOTALL)
#: Owner and name of a repository of the Hugging Face hub, without a revision.
_REPOSITORY = re.compile(r"(datasets/)?([\w.-]+/[\w.-]+)")


def url_problem(value: Any) -> str | None:
    """Return why a path is not supported, as the rest of a message after `key=value`.

    Args:
        value: path, or a tuple or list of paths; anything else passes.

    Returns:
        The problem and a remedy if a path is a URL, otherwise None.
    """
    for part in value if isinstance(value, list | tuple) else (value,):
        match = _URL.match(str(part)) if isinstance(part, str | Path) else None
        if match is not None:
            what = "is a URL" if part is value else f"contains the URL {shown(str(part))}"
            remedy = _remedy(match[1].lower(), match[2])
            return f"{what}, but must be a path of a file system; {remedy}"
    return None


def check_local(name: str, value: Any) -> None:
    """Check that a path, or each path of a list or tuple, is not a URL.

    Args:
        name: name of the key or option in the message.
        value: value; anything but paths passes.

    Raises:
        ValueError: A path is a URL.
    """
    if problem := url_problem(value):
        raise ValueError(f"{name}={_as_text(value)} {problem}")


def local_name(text: str) -> str:
    """Return the argument of an option that may be a path; the `type` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: It is a URL.
    """
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(f"{_as_text(text)} {problem}")
    return text


def local_path(text: str) -> Path:
    """Return the path that an option names; see `local_name`."""
    return Path(local_name(text))


def cache_path(cache_dir: str = "") -> Path:
    """Return the cache directory for a value of `data.cache_dir`; this does not create it."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    check_local("the environment variable XDG_CACHE_HOME", base)
    return Path(base).expanduser() / "taibai"


def _as_text(value: Any) -> str:
    return shown(str(value) if isinstance(value, Path) else value)


def _remedy(scheme: str, location: str) -> str:
    """Return what to do instead of naming a URL, given its scheme and the location after `://`."""
    if scheme == "file":
        return "write the path without file://"
    if scheme == "hf":
        repository = _REPOSITORY.match(location)
        name = repository[2] if repository else "OWNER/NAME"
        is_dataset = repository is not None and repository[1] is not None
        kind = "--repo-type=dataset " if is_dataset else ""
        first = "" if is_dataset else f"name a model as {name}, or "
        return (
            f"{first}download it with 'hf download {kind}{name} --local-dir=FOLDER', and name the "
            "folder"
        )
    hint = ""
    if scheme in ("s3", "gs"):
        hint = f" (only runs, as {scheme}://BUCKET/FOLDER, and files of data may be in a store)"
    return f"mount the store, or copy its files, and give the local path{hint}"
