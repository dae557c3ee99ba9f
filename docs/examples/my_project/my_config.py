"""Trains the model of this project on its own texts, in less than a minute on a 2-core CPU.

taibai train --config=my_config.py --workdir=runs/first
"""

from pathlib import Path

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Return the config of the run, which changes some of the defaults."""
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "my_model:MyModel"
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 64
    config.data.name = "text"
    config.data.paths = (str(Path(__file__).with_name("texts.jsonl")),)
    config.data.tokenizer = "bytes"
    config.data.sequence_length = 64
    config.data.validation_fraction = 0.1
    config.optimizer.learning_rate = 1e-2
    config.train.num_steps = 200
    return config
