"""Translates the section `parallel` of Colossal-AI's config files.

parallel = dict(pipeline=2, tensor=dict(size=4, mode="2.5d", depth=1))
->  mesh.pipeline=2, mesh.model=4, tensor.mode=2.5d, tensor.depth=1
"""

from collections.abc import Mapping
from typing import Any

from fields.numbers import shown

SECTION = "parallel"
#: Our key -> path in the section `parallel`.
_PATHS = {
    "mesh.data": ("data",),
    "mesh.pipeline": ("pipeline",),
    "mesh.model": ("tensor", "size"),
    "tensor.mode": ("tensor", "mode"),
    "tensor.depth": ("tensor", "depth"),
}


def replace_parallel(config: Any) -> None:
    """Replace the section `parallel` in a config, if there is one.

    Args:
        config: dict of sections or an unlocked ConfigDict, changed in place.

    Raises:
        ValueError: the section has another key, or a key is set in both ways.
    """
    if SECTION not in config:
        return
    section = config[SECTION]
    values = {path: value for path, value in _leaves(section).items() if value is not None}
    for path in values.keys() - {*_PATHS.values()}:
        known = ", ".join(".".join((SECTION, *known)) for known in _PATHS.values())
        raise ValueError(
            f"{'.'.join((SECTION, *path))}={shown(values[path])} is unknown; of Colossal-AI's "
            f"section {SECTION}, these keys are known: {known}"
        )
    del config[SECTION]
    for key, path in _PATHS.items():
        if path in values:
            name, _, field = key.partition(".")
            if name not in config:
                config[name] = {}
            config[name][field] = values[path]


def _leaves(section: Any) -> dict[tuple[str, ...], Any]:
    """Return the values of the section by their paths.

    Raises:
        ValueError: the section has no keys.
    """
    if not hasattr(section, "items"):
        raise ValueError(
            f"{SECTION}={shown(section)} must be a dict, such as dict(pipeline=2, "
            "tensor=dict(size=4, mode='2.5d', depth=1))"
        )
    leaves: dict[tuple[str, ...], Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping) or hasattr(value, "items"):
            # A stage may be written as pipeline=dict(size=2), too.
            is_size = {*value} == {"size"} and name != "tensor"
            inner = {(name,): value["size"]} if is_size else {}
            leaves |= inner or {(name, key): each for key, each in value.items()}
        else:
            leaves[("tensor", "size") if name == "tensor" else (name,)] = value
    return leaves
