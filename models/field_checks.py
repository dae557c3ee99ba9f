"""Checks of the fields of a model's config, which is a section `model`."""

from collections.abc import Iterable
from typing import Any


def check_choices(config: Any, **choices: Iterable[str]) -> None:
    """Raise a ValueError if a field has none of the values that it may have.

    Args:
        config: dataclass.
        **choices: values of each field to check.
    """
    for name, values in choices.items():
        if (value := getattr(config, name)) not in values:
            raise ValueError(f"model.{name}={value!r} is unknown; choose {', '.join(values)}")


def check_needs(config: Any, **needs: str) -> None:
    """Raise a ValueError if a field is set without the one that it needs.

    Args:
        config: dataclass.
        **needs: name of the field that each field needs. False and None mean that it is not set.
    """
    for name, needed in needs.items():
        value = getattr(config, name)
        other = getattr(config, needed)
        if value not in (None, False) and other in (None, False):
            needed = f"model.{needed}=True" if other is False else f"model.{needed}"
            raise ValueError(
                f"model.{name}={value} needs {needed}; set it, or leave model.{name} out"
            )
