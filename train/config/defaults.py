"""Builds the default ConfigDict, which config files start from, out of the declared fields."""

import dataclasses
import types
import typing
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fields.field import Declaration, declarations
from train.config.schema import SECTIONS, RunConfig


def default_config() -> ConfigDict:
    """Return all sections except `model`, with the default of every key.

    A key whose default is None is a placeholder, which accepts None and values of the field's type.
    """
    top = declarations(RunConfig)
    config = ConfigDict()
    for each in dataclasses.fields(RunConfig):
        if each.name in SECTIONS and each.name != "model":  # a config file defines it
            config[each.name] = _section(SECTIONS[each.name])
        elif each.name in top:
            config[each.name] = _value(top[each.name], each.type)
    return config


def _section(section: type) -> ConfigDict:
    declared = declarations(section)
    values = ConfigDict()
    for each in dataclasses.fields(section):
        values[each.name] = _value(declared[each.name], each.type)
    return values


def _value(declaration: Declaration, annotation: Any) -> Any:
    """Return the value of a key in the default ConfigDict."""
    if isinstance(declaration.default, dict):
        return ConfigDict(declaration.default)
    if not declaration.is_optional:
        return declaration.default
    assert isinstance(annotation, types.UnionType), "an optional field is annotated `X | None`"
    (kind,) = set(typing.get_args(annotation)) - {types.NoneType}
    return placeholder(kind)
