"""Corpora returned by a user's function, which `data.name` names by its import path."""

from collections.abc import Mapping, Sequence
from typing import Any

from untrusted.imports import import_object

SPLITS = ("train", "validation")


def call_own(name: str, kind: str) -> Mapping[str, Sequence[Any]]:
    """Call the user's function, and return its dict, which has a sequence for each of SPLITS.

    Args:
        name: import path of the function, `package.module:function`.
        kind: type of the items in the sequences, for messages.

    Raises:
        ValueError: There is no such function, it raises, or it returns anything else.
    """
    function = import_object(name, "data.name")
    if not callable(function):
        raise ValueError(
            f"data.name={name!r} is of type {type(function).__name__}, but must be a function "
            "without arguments that returns {'train': ..., 'validation': ...}"
        )
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
