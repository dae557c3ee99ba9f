"""OPT on one device, on the source text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 1 minute to reach a validation loss
of about 4.56 nats per token (7.64 at the start).

    python -m train.main --config=configs/opt.py

`--config=configs/opt.py:SIZE` selects a published size, for accelerators: 125m, 350m, 1.3b, 2.7b,
6.7b, 13b, 30b, 66b or 175b. These need a corpus and a tokenizer of matching size.
"""

from ml_collections import ConfigDict

from configs import common, sizes

#: name -> (layers, heads, embed dim, learning rate). Zhang et al. 2022 (arXiv:2205.01068), table 1.
SIZES = {
    "125m": (12, 12, 768, 6e-4),
    "350m": (24, 16, 1024, 3e-4),
    "1.3b": (24, 32, 2048, 2e-4),
    "2.7b": (32, 32, 2560, 1.6e-4),
    "6.7b": (32, 32, 4096, 1.2e-4),
    "13b": (40, 40, 5120, 1e-4),
    "30b": (48, 56, 7168, 1e-4),
    "66b": (64, 72, 9216, 0.8e-4),
    "175b": (96, 96, 12288, 1.2e-4),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("opt", size, ("tiny", *SIZES))
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "opt"
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.dropout = 0.0
    config.model.head = "lm"  # "none" returns activations and cannot be trained
    config.model.loss = "cross_entropy"  # or package.module:function; see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        config.optimizer.learning_rate = 3e-3
        config.train.num_steps = 300
        return config

    layers, heads, embed, learning_rate = SIZES[size]
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.embed_dim = embed
    config.model.mlp_dim = 4 * embed
    config.model.dropout = 0.1
    if size == "350m":
        config.model.token_embed_dim = 512
        config.model.norm_first = False  # norms after the residual sums
    sizes.at_scale(config, sequence_length=2048, vocab_size=50272, learning_rate=learning_rate)
    return config
