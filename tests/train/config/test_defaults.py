"""The default ConfigDict has the recorded keys, types and defaults, in the recorded order."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs import common
from tests.runs import ROOT
from train.config.config_files import as_yaml
from train.config.schema import SECTIONS

#: A line `key type default` for every key. A new key needs a new line; other lines change only if
#: the default of the key is meant to change.
RECORDED = Path(__file__).with_name("default_keys.txt")
_IN_A_NEW_PROCESS = """
from configs import gpt2
gpt2.get_config()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def listing(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line `key type default` for every key, in the order in which the keys were set."""
    for name in config._fields:  # iteration over a ConfigDict sorts its keys
        value = config[name]
        if isinstance(value, ConfigDict):
            yield from (
                listing(value, f"{prefix}{name}.") if len(value) else [f"{name} section {{}}"]
            )
        else:
            yield f"{prefix}{name} {config.get_type(name).__name__} {value!r}"


def test_default_config_has_the_recorded_keys_types_and_defaults():
    assert [*listing(common.get_config())] == RECORDED.read_text(encoding="utf-8").splitlines()


def test_default_config_accepts_values_of_the_type_of_a_placeholder():
    config: Any = common.get_config()
    config.eval.num_batches = 3
    config.eval.num_batches = None
    config.memory.device_budget = 2.5
    assert (config.eval.num_batches, config.memory.device_budget) == (None, 2.5)


def test_default_configs_share_nothing():
    config: Any = common.get_config()
    config.rules.mlp = None
    config.train.seed = 7
    again: Any = common.get_config()
    assert not len(again.rules) and again.train.seed == 0


def test_default_config_constructs_every_section_and_survives_yaml(tmp_path):
    config: Any = common.get_config()
    (tmp_path / "config.yaml").write_text(as_yaml(config.to_dict()))
    for name, section in SECTIONS.items():
        if name == "model":  # a config file defines it
            assert name not in config
            continue
        assert section(**config[name].to_dict()).section == name


def test_loading_a_config_starts_no_devices():
    subprocess.run([sys.executable, "-c", _IN_A_NEW_PROCESS], cwd=ROOT, check=True)
