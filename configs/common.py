"""The config sections that all runs share; docs/config.md describes every key.

A config file starts from `get_config()` and sets only the keys whose value is not the default. You
can set any key on the command line: `--config.section.key=value`. Each config file defines the
section `model`; the defaults of its keys are in the dataclass `Config` of the model, and sizes that
the data has, such as `vocab_size`, come from there.

Some keys of `model`, such as `dropout`, `head` and `loss`, have no fixed default: a run takes them
from its checkpoint `init_from` if its config does not set them. So config files do set them.
"""

from ml_collections import ConfigDict

from train.config.defaults import default_config


def get_config() -> ConfigDict:
    """Return the shared sections; each config file adds the section `model`."""
    return default_config()
