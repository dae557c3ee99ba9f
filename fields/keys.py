"""Checks the keys of a section; an error about an unknown key suggests the nearest known key."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def check_keys(
    section: type, values: Mapping[str, Any], name: str, *, may_be_open: Collection[str] = ()
) -> list[str]:
    """Check that the keys of a section are fields of its dataclass, and that none is missing.

    Args:
        section: dataclass.
        values: field name -> value.
        name: name of the section in messages, such as "config.model".
        may_be_open: fields that may be missing or None, because their value is found later.

    Returns:
        The keys of `may_be_open` without a value.

    Raises:
        ValueError: A key is unknown or missing.
    """
    fields = {each.name: each for each in dataclasses.fields(section)}
    for key in values:
        if key not in fields:
            prefix = name.replace(" ", ".").rpartition(".")[2]  # "model" of "config.model"
            known = [f"{prefix}.{each}" for each in fields]
            raise ValueError(f"{name}.{key}: unknown key{nearest(f'{prefix}.{key}', known)}")
    are_open = [key for key in may_be_open if values.get(key) is None]
    for key, each in fields.items():
        is_required = each.default is each.default_factory is dataclasses.MISSING
        if is_required and key not in (*values, *are_open):
            raise ValueError(f"{name}.{key} is missing")
    return are_open


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the end of an error message for an unknown key: the nearest known key, if any."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    close = close or [k for k in known if k.endswith("." + key.rpartition(".")[2])][:1]
    return f"; the nearest known key is {close[0]}" if close else ""
