"""Loads and resolves configs for the tests here."""

from collections.abc import Sequence
from typing import Any

from tests.runs import CONFIG
from train.config import config_files
from train.config.overrides import Overrides
from train.config.schema import RunConfig, validate_config


def load(path: str, changes: Overrides | Sequence[str] = ()) -> Any:
    """Return the config without a static type, since ConfigDict's attributes vary."""
    return config_files.load(path, changes)


def run_of(*changes: str, config: str = CONFIG) -> RunConfig:
    return validate_config(load(config, changes))
