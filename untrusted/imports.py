"""Imports objects that a config names by their import path, `package.module:attribute`.

Importing a module runs its code. A path in a config.py or on the command line is the user's own
choice. A path in a config.yaml, which may come with a run from somebody else, is data: it is
imported only if the user allows it, either with `--allow_import=package` or by giving the same path
on the command line or in a config.py.
"""

import argparse
import difflib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# A TFDS name may end with a version, such as 'ag_news_subset:1.0.0'. Versions begin with a digit,
# which an attribute cannot.
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(value: object) -> bool:
    """Return whether a value of a config is an import path."""
    return isinstance(value, str) and _IMPORT_PATH.fullmatch(value) is not None


def import_object(path: str, key: str, names: Collection[str] = ()) -> Any:
    """Import an object.

    Args:
        path: Its import path, `package.module:attribute`.
        key: The config key with this path, for messages.
        names: The names that `key` may have instead of an import path, for messages.

    Raises:
        ValueError: `path` is not an import path, or there is no such module or attribute, or
            importing the module fails.
    """
    if not is_import_path(path):
        known = f"one of {', '.join(names)} nor " if names else ""
        raise ValueError(
            f"{key}={path!r} is {'neither ' if names else 'not '}{known}an import path, "
            "'package.module:attribute'"
        )
    module_name, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"{key}={path!r}: there is no module {error.name!r}; correct the name, start "
                "Python in the directory of the module, or add that directory to PYTHONPATH"
            ) from error
        raise ValueError(f"{key}={path!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{key}={path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            raise ValueError(
                f"{key}={path!r}: {found.__name__} has no {part!r}; "
                + (f"the nearest names are {near}" if near else "correct the name")
            )
        found = getattr(found, part)
    return found


def import_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, import path) for every import path in a config, such as ("model.name", "a:B")."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from import_paths(value, f"{prefix}{key}.")
        for item in value if isinstance(value, list | tuple) else [value]:
            if is_import_path(item):
                yield prefix + key, item


def check_imports(tree: Mapping[str, Any], file: Path, allowed: Collection[str]) -> None:
    """Check that the user allows all imports of a config from a file.

    Args:
        tree: The config: sections of keys.
        file: The file that the config comes from.
        allowed: Import paths, and names of packages or modules, that may be imported.

    Raises:
        ValueError: The config has an import path that is not allowed.
    """
    for key, path in import_paths(tree):
        module = path.partition(":")[0]
        if path not in allowed and not any(f"{module}.".startswith(f"{p}.") for p in allowed):
            raise ValueError(
                f"{file} has {key}={path!r}, which would import the module {module} and run its "
                f"code; if you trust that code, add --allow_import={module.partition('.')[0]}, or "
                f"set {key} yourself"
            )


def add_allow_import(parser: argparse.ArgumentParser) -> None:
    """Add the option `--allow_import` to a command line; its value is a list of names."""
    parser.add_argument(
        "--allow_import",
        type=lambda text: tuple(name for name in text.split(",") if name),
        default=(),
        metavar="PACKAGE,...",
        help="packages whose code a config.yaml may import, and so run",
    )
