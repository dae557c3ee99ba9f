"""Overrides: the values that a command line or a DeepSpeed JSON sets in a config.

    --config.optimizer.clip_norm=0.5 -> Override("optimizer.clip_norm", "0.5", 0.5)

The text of the command line is parsed once, into `Overrides`, which know where each value came
from. `Overrides.apply` sets the values; `validate_config` checks them with the values of the file.
"""

import ast
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fields.keys import nearest
from fields.types import split_at_commas
from models.registry import find_model
from models.section import ModelSettings
from train.config.old_keys import NEW_KEYS, replace_old_keys
from train.config.peer_keys import hint_about
from untrusted.imports import allow_imports_in, is_import_path

_PREFIX = "--config."
#: Other spellings of Python's constants.
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


class Override(NamedTuple):
    """A key, and the value to set."""

    key: str
    text: str  # the value of a key for a string
    value: Any  # the value of any other key; the text itself if it is no literal of Python

    def set_in(self, config: Any) -> None:
        """Set the key in a ConfigDict; its current value says what the text stands for.

        Raises:
            ValueError: the key is unknown.
        """
        section, _, name = self.key.partition(".")
        if self.key in NEW_KEYS and section in config:
            store(config[section], name, self.text)
            return
        if self.key == "init_from":
            config.init_from = self.text
            return
        if section == "rules" and name and "rules" in config:
            config.rules[name] = self.value
            return
        keys = [f"{s}.{k}" for s in config if isinstance(config[s], ConfigDict) for k in config[s]]
        if self.key in keys:
            current_value = config[section][name]
        else:
            fields = _model_fields(config)
            if section != "model" or name not in fields:
                known = [*keys, *(f"model.{field}" for field in fields)]
                hint = hint_about(self.key)
                hint = nearest(self.key, known) if hint is None else f"; {hint}"
                raise ValueError(f"--config.{self.key}: unknown key{hint}")
            current_value = _default_of(fields[name])
        value = self.text if isinstance(current_value, str) else self.value
        if isinstance(current_value, tuple):
            parts = self.text if isinstance(value, str) else value
            value = split_at_commas(parts if isinstance(parts, str | tuple | list) else (parts,))
        store(config[section], name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """The values that replace values of a config file, by where they came from.

    Attributes:
        command_line: of several values of a key, the last one counts.
        deepspeed: values of a DeepSpeed JSON, for keys that the command line does not set.
    """

    command_line: tuple[Override, ...] = ()
    deepspeed: tuple[Override, ...] = ()

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Overrides":
        """Parse the arguments of a command line that set config keys.

        Args:
            arguments: `--config.section.key=value` or `--config.section.key value`.

        Raises:
            ValueError: an argument has another form, or no value.
        """
        overrides = []
        remaining_arguments = list(arguments)
        while remaining_arguments:
            argument = remaining_arguments.pop(0)
            if not argument.startswith(_PREFIX):
                raise ValueError(
                    f"unknown argument {argument!r}; config keys are set as "
                    "--config.section.key=value"
                )
            key, equals, text = argument.removeprefix(_PREFIX).partition("=")
            if not equals:
                if not remaining_arguments or remaining_arguments[0].startswith("--"):
                    raise ValueError(f"{argument} has no value; write {argument}=value")
                text = remaining_arguments.pop(0)
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                value = _CONSTANTS.get(text.lower(), text)
            overrides.append(Override(key, text, value))
        return cls(command_line=tuple(overrides))

    @classmethod
    def of(cls, overrides: "Overrides | Sequence[str] | Mapping[str, Any]") -> "Overrides":
        """Return overrides, which code may also write as strings `section.key=value`, or a dict.

        A dict has the names `section.key` as keys, and values of any type.
        """
        if isinstance(overrides, Overrides):
            return overrides
        if isinstance(overrides, Mapping):
            return cls(command_line=tuple(_overrides_of(overrides)))
        return cls.parse([_PREFIX + text for text in overrides])

    def with_deepspeed(self, values: Mapping[str, Any]) -> "Overrides":
        """Add the values of a DeepSpeed JSON, by key, unless the command line sets the key."""
        others = {key: x for key, x in values.items() if key not in self.command_line_keys}
        return dataclasses.replace(self, deepspeed=tuple(_overrides_of(others)))

    @property
    def command_line_keys(self) -> set[str]:
        """The keys that the command line sets."""
        return {NEW_KEYS.get(override.key, override.key) for override in self.command_line}

    @property
    def keys(self) -> set[str]:
        """The keys that the command line or the DeepSpeed JSON sets."""
        return self.command_line_keys | {override.key for override in self.deepspeed}

    def apply(self, config: Any) -> None:
        """Set the keys in a config; the user's values may import the code that they name.

        Args:
            config: ConfigDict, changed in place.

        Raises:
            ValueError: keys are unknown; it names all of them.
        """
        for override in self.command_line:
            allow_imports_in(override.text)
        # Names come first: the model's name decides which other keys there are.
        overrides = [*self.deepspeed, *self.command_line]
        names = [o for o in overrides if o.key.endswith(".name") or is_import_path(o.text)]
        problems = []
        for override in [*names, *(o for o in overrides if o not in names)]:
            try:
                override.set_in(config)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; and ".join(dict.fromkeys(problems)))
        with config.unlocked(), config.ignore_type():
            replace_old_keys(config)


def _overrides_of(values: Mapping[str, Any]) -> Iterator[Override]:
    """Yield the overrides that set these values, by key."""
    for key, value in values.items():
        yield Override(key, str(value), value)


def store(section: ConfigDict, key: str, value: Any) -> None:
    """Set a key of a config to a value of any type, which `validate_config` checks.

    The old value is removed first: otherwise the ConfigDict would convert an int or a bool to its
    type, and fail for 10**400. A dict needs a placeholder: otherwise it would become a section,
    whose keys may have no dots.
    """
    with section.unlocked(), section.ignore_type():
        if key in section:
            del section[key]
        if isinstance(value, dict):
            section[key] = placeholder(dict)
        section[key] = value


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
