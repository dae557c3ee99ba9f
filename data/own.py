"""Corpora returned by a user's function, which `data.name` names by its import path."""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SPLITS = ("train", "validation")
# A TFDS name may end with a version, such as 'ag_news_subset:1.0.0'. Versions begin with a digit,
# which an attribute cannot.
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_own(name: str) -> bool:
    """Return whether `data.name` is the import path of a function."""
    return _IMPORT_PATH.fullmatch(name) is not None


def call_own(name: str, kind: str) -> Mapping[str, Sequence[Any]]:
    """Call the user's function and check its result.

    Args:
        name: The import path of the function, `package.module:function`.
        kind: The type of the items in the sequences, for messages.

    Returns:
        The dict that the function returned, with a sequence for each of SPLITS.

    Raises:
        ValueError: There is no such function, it raises, or it returns anything else.
    """
    function = _import_callable(name)
    try:
        returned = function()
    except Exception as error:
        raise ValueError(
            f"data.name={name!r} failed: {type(error).__name__}: {error}; fix the function"
        ) from error
    if not isinstance(returned, Mapping) or not set(SPLITS) <= set(returned):
        what = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned)
        raise ValueError(
            f"data.name={name!r} returned {what}, but must return a dict with the keys "
            f"'train' and 'validation', each a sequence of {kind}"
        )
    for split in SPLITS:
        values = returned[split]
        if not (hasattr(values, "__len__") and hasattr(values, "__getitem__")) or isinstance(
            values, str
        ):
            raise ValueError(
                f"data.name={name!r} returned a {type(values).__name__} for {split!r}, but must "
                f"return a sequence of {kind}; return a list, or a class with __len__ and "
                "__getitem__"
            )
    return returned


def _import_callable(name: str) -> Callable[[], object]:
    module_name, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"data.name={name!r}: there is no module {error.name!r}; correct the name, start "
                "Python in the directory of the module, or add that directory to PYTHONPATH"
            ) from error
        raise ValueError(f"data.name={name!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ValueError(
            f"data.name={name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            raise ValueError(
                f"data.name={name!r}: {found.__name__} has no {part!r}; "
                + (f"the nearest names are {near}" if near else "correct the name")
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"data.name={name!r} is of type {type(found).__name__}, but must be a function without "
            "arguments that returns {'train': ..., 'validation': ...}"
        )
    return found
