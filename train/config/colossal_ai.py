"""Translates the section `parallel` of Colossal-AI's config files.

parallel = dict(pipeline=2, tensor=dict(size=4, mode="2.5d", depth=1))
->  mesh.pipeline=2, mesh.model=4, tensor.mode=2.5d, tensor.depth=1
"""

from collections.abc import Iterator
from typing import Any

from fields.numbers import shown

SECTION = "parallel"
#: Path in the section `parallel` -> our key.
_KEYS = {
    ("data",): "mesh.data",
    ("data", "size"): "mesh.data",
    ("pipeline",): "mesh.pipeline",
    ("pipeline", "size"): "mesh.pipeline",
    ("tensor",): "mesh.model",
    ("tensor", "size"): "mesh.model",
    ("tensor", "mode"): "tensor.mode",
    ("tensor", "depth"): "tensor.depth",
}


def replace_parallel(config: Any) -> None:
    """Replace the section `parallel` in a config, if there is one.

    Args:
        config: dict of sections or an unlocked ConfigDict, changed in place.

    Raises:
        ValueError: the section is not a dict, or has another key.
    """
    if SECTION not in config:
        return
    section = config[SECTION]
    if not hasattr(section, "items"):
        raise ValueError(
            f"{SECTION}={shown(section)} must be a dict, such as dict(pipeline=2, "
            "tensor=dict(size=4, mode='2.5d', depth=1))"
        )
    del config[SECTION]
    for path, value in _leaves(section):
        if path not in _KEYS:
            known = ", ".join(".".join((SECTION, *known)) for known in _KEYS)
            raise ValueError(
                f"{'.'.join((SECTION, *path))}={shown(value)} is unknown; of Colossal-AI's "
                f"section {SECTION}, these keys are known: {known}"
            )
        if value is not None:
            name, _, field = _KEYS[path].partition(".")
            if name not in config:
                config[name] = {}
            config[name][field] = value


def _leaves(section: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of the section with their paths."""
    for name, value in section.items():
        if hasattr(value, "items"):
            yield from (((name, key), each) for key, each in value.items())
        else:
            yield (name,), value
