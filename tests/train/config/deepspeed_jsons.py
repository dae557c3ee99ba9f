"""Writes and translates DeepSpeed JSONs."""

import json
from pathlib import Path

from tests.runs import CONFIG
from train.config.config_files import load
from train.config.deepspeed import read
from train.config.overrides import Overrides
from train.config.schema import RunConfig, validate_config


def written(tree: dict, directory: Path) -> str:
    """Write a JSON, and return its path."""
    path = directory / "ds.json"
    path.write_text(json.dumps(tree))
    return str(path)


def translated(tree: dict, directory: Path, *own: str) -> RunConfig:
    """Return the run config for a JSON, with command-line overrides."""
    overrides = Overrides.of(own)
    values = read(written(tree, directory), load(CONFIG, own)).values
    return validate_config(load(CONFIG, overrides.with_deepspeed(values)))
