"""Applies the overrides of a command line, `--config.section.key=value`, to a config.

An override is kept as the text `section.key=value`, on command lines as in the results of
benchmarks. Code that needs its parts calls `Override.parse`.
"""

import ast
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fields.keys import nearest
from fields.numbers import number_problem, shown
from models.registry import find_model
from models.section import ModelSettings
from untrusted.imports import allow_imports_in, is_import_path


class Override(NamedTuple):
    """An override `section.key=value` of the command line, split into its parts."""

    key: str
    text: str

    @classmethod
    def parse(cls, override: str) -> "Override":
        """Split an override.

        Raises:
            ValueError: it has no value.
        """
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--config.{override} has no value; write --config.{key}=value")
        return cls(key, text)


def parse_overrides(arguments: Sequence[str]) -> list[str]:
    """Return `section.key=value` for every `--config.section.key=value` on a command line.

    Args:
        arguments: command-line arguments; `--config.key value` is accepted as well.

    Raises:
        ValueError: an argument has another form.
    """
    overrides = []
    remaining_arguments = list(arguments)
    while remaining_arguments:
        argument = remaining_arguments.pop(0)
        if not argument.startswith("--config."):
            raise ValueError(
                f"unknown argument {argument!r}; config keys are set as --config.section.key=value"
            )
        if (
            "=" not in argument
            and remaining_arguments
            and not remaining_arguments[0].startswith("--")
        ):
            argument += "=" + remaining_arguments.pop(0)
        overrides.append(argument.removeprefix("--config."))
    return overrides


def apply_overrides(config: Any, overrides: Sequence[str]) -> None:
    """Set keys of a config; their values may import the code that they name.

    Args:
        config: ConfigDict, changed in place.
        overrides: strings `section.key=value`.

    Raises:
        ValueError: a key is unknown, or a value has another type than the key's default.
    """
    parsed_overrides = [Override.parse(override) for override in overrides]
    for each in parsed_overrides:
        allow_imports_in(each.text)
    # Names come first: the model's name decides which other keys there are.
    names = [
        each for each in parsed_overrides if each.key.endswith(".name") or is_import_path(each.text)
    ]
    for each in names:
        _set(config, each.key, each.text)
    for each in parsed_overrides:
        if each not in names:
            _set(config, each.key, each.text)


def check_number(key: str, value: Any) -> None:
    """Refuse a number that a ConfigDict could not convert to a float."""
    if problem := number_problem(value, is_float=True):
        raise ValueError(f"{key}={shown(value)} {problem}")


def _set(config: Any, key: str, text: str) -> None:
    if key == "init_from":
        config.init_from = text
        return
    section, _, name = key.partition(".")
    keys = [f"{s}.{k}" for s in config if isinstance(config[s], ConfigDict) for k in config[s]]
    if section == "rules" and name and "rules" in config:
        config.rules[name] = _parse(text)
        return
    if key not in keys:
        fields = _model_fields(config)
        if section != "model" or name not in fields:
            known = [*keys, *(f"model.{field}" for field in fields)]
            raise ValueError(f"--config.{key}: unknown key{nearest(key, known)}")
        with config.unlocked(), config.ignore_type():
            config.model[name] = _default_of(fields[name])
    default = config[section][name]
    value = text if isinstance(default, str) else _parse(text)
    check_number(f"--config.{key}", value)
    if isinstance(default, tuple):
        parts = text.split(",") if isinstance(value, str) else value
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        value = tuple(part for part in parts if part != "")
    elif isinstance(default, float) and type(value) is int:
        value = float(value)
    numbers = section == "model" and {type(default), type(value)} == {int, float}
    # A DeepSpeed file is translated with these values, before `validate_config`, which knows the
    # type of each key, checks them. It also checks None, and int versus float in `model`.
    if None not in (default, value) and type(value) is not type(default) and not numbers:
        kind = type(default).__name__
        raise ValueError(f"--config.{key}={text[:60]} must be of type {kind}, such as {default!r}")
    with config.ignore_type():
        config[section][name] = value


def _model_fields(config: ConfigDict) -> dict[str, dataclasses.Field]:
    """Return the fields of the section `model`, by name."""
    if "model" not in config:
        return {}
    model: Any = config.model
    name = model.get("name")
    config_fields = dataclasses.fields(find_model(name).Config) if name else ()
    return {field.name: field for field in (*dataclasses.fields(ModelSettings), *config_fields)}


def _default_of(field: dataclasses.Field) -> Any:
    """Return a value of the type of a field, or None: its default, or an example."""
    if field.default is not dataclasses.MISSING:
        return field.default
    origin = typing.get_origin(field.type) or field.type
    return origin() if origin in (int, float, str, bool, tuple) else None


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # nested too deeply
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)
