"""Names of validation sets in front of their paths, as in `wiki=wiki/*.jsonl`."""

import re
from collections.abc import Sequence

from fields.paths import check_local

#: A name is part of the names of metrics, such as `eval_wiki_loss`.
_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def named_paths(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group paths by the name in front of them; those without a name have the name "".

    For example, `("a=1.txt", "2.txt", "a=3.txt")` is `{"a": ("1.txt", "3.txt"), "": ("2.txt",)}`.

    Args:
        entries: `PATH` or `NAME=PATH`, in the order of the config.

    Raises:
        ValueError: A name has no path, or a path is a URL.
    """
    groups: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        match = _NAMED.fullmatch(entry)
        name, path = match.groups() if match else ("", entry)
        if not path:
            raise ValueError(
                f"data.validation_paths: {entry!r} has no path; write for example {entry}data.jsonl"
            )
        check_local("data.validation_paths: the path", path)
        groups[name] = (*groups.get(name, ()), path)
    return groups
