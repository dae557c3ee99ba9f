"""Trains the model of docs/examples/gated_mean.py on a 2×2×2 mesh.

Takes a minute on a 2-core CPU.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Return the config of the run."""
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "docs.examples.gated_mean:GatedMean"
    config.model.num_layers = 4
    config.model.embed_dim = 128
    config.model.dropout = 0.1
    config.mesh.pipeline = config.mesh.data = config.mesh.model = 2
    config.train.num_microbatches = 4
    config.data.vocab_size = 2048
    return config
