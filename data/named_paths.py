"""The form of paths of data, and names of validation sets in front of them: `wiki=wiki/*.jsonl`."""

import fnmatch
import re
from collections.abc import Sequence

from fields.paths import check_local
from untrusted.hub import dataset_of
from untrusted.stores import is_url

#: A name is part of the names of metrics, such as `eval_wiki_loss`.
_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def check_entry(name: str, path: str) -> None:
    """Check that a path of data is a local one, `hf://datasets/org/name@revision/path`, or a URL.

    Args:
        name: name of the key in the message.

    Raises:
        ValueError: It is a URL of another form.
    """
    try:
        if dataset_of(path) is not None:
            return
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if not is_url(path):
        check_local(name, path)


def split_name(entry: str) -> tuple[str, str]:
    """Return the name and the path of `NAME=PATH`; the name is "" if there is none."""
    match = _NAMED.fullmatch(entry)
    return (match[1], match[2]) if match else ("", entry)


def named_paths(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group paths by the name in front of them; those without a name have the name "".

    For example, `("a=1.txt", "2.txt", "a=3.txt")` is `{"a": ("1.txt", "3.txt"), "": ("2.txt",)}`.

    Args:
        entries: `PATH` or `NAME=PATH`, in the order of the config.

    Raises:
        ValueError: A name has no path, or a path is a URL of another form; see `check_entry`.
    """
    groups: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        name, path = split_name(entry)
        if not path:
            raise ValueError(
                f"data.validation_paths: {entry!r} has no path; write for example {entry}data.jsonl"
            )
        check_entry("data.validation_paths: the path", path)
        groups[name] = (*groups.get(name, ()), path)
    return groups


def matching_files(files: Sequence[str], path: str) -> list[str]:
    """Return the files that a path stands for: a file, a glob as for local files, or a folder.

    Args:
        files: names of the files of a dataset or store.
    """
    if path in files:
        return [path]
    parts = path.split("/")
    matches = [file for file in files if _matches(file.split("/"), parts)]
    return matches or [file for file in files if not path or file.startswith(f"{path}/")]


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(names[i:], pattern[1:]) for i in range(len(names) + 1))
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], pattern[0])
        and _matches(names[1:], pattern[1:])
    )
