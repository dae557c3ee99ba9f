"""Imports objects that a config names by their import path, `package.module:attribute`.

Importing a module runs its code. A path in a config.py or on the command line is the user's own
choice. A path in a file that may come from somebody else, such as the config.yaml of a run, is
data: it is imported only if the user allows it, either with `--allow_import=package` or by giving
the same path on the command line or in a config.py.

The decision is made where the import happens, in `import_object`, from a record of this process:

    allow_imports(["gift"])          the user allows a package with --allow_import
    allow_imports_in(overrides)      the user names paths on the command line or in a config.py
    record_received(tree, file)      a received file names paths
    import_object("gift.loss:f")     allowed, because of the first line

So it does not matter how a value of a received file becomes an import path, for example as one of
the sources of a mixture.
"""

import argparse
import dataclasses
import difflib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# A TFDS name may end with a version, such as 'ag_news_subset:1.0.0'. Versions begin with a digit,
# which an attribute cannot.
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Separators of the words in a value, such as the sources of a mixture on the command line.
_SEPARATORS = re.compile(r"[\s,'\"()\[\]]+")


@dataclasses.dataclass
class _Record:
    """Which import paths the user chose, and which come from files of somebody else.

    Attributes:
        allowed: import paths, and names of packages or modules, that the user chose.
        received: file -> the (key, value) of all its strings that could name an import path.
    """

    allowed: set[str] = dataclasses.field(default_factory=set)
    received: dict[Path, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)


_record = _Record()


def is_import_path(value: object) -> bool:
    """Return whether a value of a config is an import path."""
    return isinstance(value, str) and _IMPORT_PATH.fullmatch(value) is not None


def allow_imports(names: Collection[str]) -> None:
    """Record that the user allows imports, for the rest of this process.

    Args:
        names: import paths, and names of packages or modules.
    """
    _record.allowed.update(names)


def allow_imports_in(value: object) -> None:
    """Record that the user wrote a value, so that all import paths in it may be imported.

    Args:
        value: text of an override, or a config: sections of keys.
    """
    allow_imports([path for _, path in _import_paths(value)])


def record_received(tree: object, file: Path) -> None:
    """Record that a file may come from somebody else, so that it does not decide about imports.

    Args:
        tree: content of the file.
        file: file, for messages.
    """
    _record.received[file] = [(key, text) for key, text in _strings(tree) if ":" in text]


def check_imports(tree: object) -> None:
    """Check early that all import paths in a config are allowed; see `check_import`."""
    for _, path in _import_paths(tree):
        check_import(path)


def check_import(path: str) -> None:
    """Check that an object may be imported.

    Args:
        path: its import path, `package.module:attribute`.

    Raises:
        ValueError: The path comes from a received file, and the user does not allow it.
    """
    module = path.partition(":")[0]
    if path in _record.allowed or is_module_allowed(module):
        return
    # The value may contain more than the path, such as the weight of a source, but its names must
    # be whole: neither 'my_own:loss' nor 'my.own:loss' would import the module of 'own:loss'.
    whole = re.compile(rf"(?<!\w)(?<!\w\.){re.escape(path)}(?!\w)")
    for file, strings in _record.received.items():
        for key, text in strings:
            if whole.search(text):
                raise ValueError(
                    f"{file} has {key}={text!r}, which would import the module {module} and run "
                    "its code; if you trust that code, add "
                    f"--allow_import={module.partition('.')[0]}, or set {key} yourself"
                )


def is_module_allowed(module: str) -> bool:
    """Return whether the user allows a module, or a package that it is in."""
    return any(f"{module}.".startswith(f"{name}.") for name in _record.allowed)


def import_object(path: str, key: str, names: Collection[str] = ()) -> Any:
    """Import an object, if that is allowed.

    Args:
        path: its import path, `package.module:attribute`.
        key: config key with this path, for messages.
        names: names that `key` may have instead of an import path, for messages.

    Raises:
        ValueError: `path` is not an import path, it may not be imported (see `check_import`),
            there is no such module or attribute, or importing the module fails.
    """
    if not is_import_path(path):
        known = f"one of {', '.join(names)} nor " if names else ""
        raise ValueError(
            f"{key}={path!r} is {'neither ' if names else 'not '}{known}an import path, "
            "'package.module:attribute'"
        )
    check_import(path)
    module_name, _, attribute = path.partition(":")
    try:
        target = importlib.import_module(module_name)
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
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=3)
            raise ValueError(
                f"{key}={path!r}: {target.__name__} has no {part!r}; "
                + (f"the nearest names are {near}" if near else "correct the name")
            )
        target = getattr(target, part)
    return target


def _import_paths(value: object) -> Iterator[tuple[str, str]]:
    """Yield (key, import path) for every import path in a value, such as ("model.name", "a:B")."""
    for key, text in _strings(value):
        for word in _SEPARATORS.split(text):
            if is_import_path(word):
                yield key, word


def _strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, string) for every string in a value, such as ("data.mixture", "1 text").

    This includes the names of keys, and the sets that a YAML file can contain.
    """
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield key, str(name)
            yield from _strings(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _strings(item, key)


def add_allow_import(parser: argparse.ArgumentParser) -> None:
    """Add the option `--allow_import` to a command line; its value is a list of names."""
    parser.add_argument(
        "--allow_import",
        type=lambda text: tuple(name for name in text.split(",") if name),
        default=(),
        metavar="PACKAGE,...",
        help="packages whose code a config.yaml may import, and so run",
    )
