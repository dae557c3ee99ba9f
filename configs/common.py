"""The config sections that all runs share; docs/config.md describes every key.

A config file starts from `get_config()` and changes the keys that it needs. You can set any key on
the command line: `--config.section.key=value`. Each config file defines the section `model`.
"""

from ml_collections import ConfigDict

from train.config.defaults import default_config


def get_config() -> ConfigDict:
    """Return the shared sections; each config file adds the section `model`."""
    return default_config()
