"""GPT-2 on one device, on the source text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 1.5 minutes to reach a validation
loss of about 3.95 nats per token (7.65 at the start).

    python -m train.main --config=configs/gpt2.py

`--config=configs/gpt2.py:SIZE` selects a published size, for accelerators: small (124 M), medium
(350 M), large (774 M), xl (1.5 B), or 2.7b, 6.7b, 13b, 175b (GPT-3). These need a corpus and a
tokenizer of matching size: set `data.name` or `data.paths`, and `data.tokenizer`.
"""

from ml_collections import ConfigDict

from configs import common, sizes

#: name -> (layers, heads, embed dim, positions, learning rate). Sizes up to xl: Radford et al.
#: 2019, table 2. Sizes from 2.7b on, and all learning rates: Brown et al. 2020, table 2.1.
SIZES = {
    "small": (12, 12, 768, 1024, 6e-4),
    "medium": (24, 16, 1024, 1024, 3e-4),
    "large": (36, 20, 1280, 1024, 2.5e-4),
    "xl": (48, 25, 1600, 1024, 2e-4),
    "2.7b": (32, 32, 2560, 2048, 1.6e-4),
    "6.7b": (32, 32, 4096, 2048, 1.2e-4),
    "13b": (40, 40, 5120, 2048, 1e-4),
    "175b": (96, 96, 12288, 2048, 0.6e-4),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("gpt2", size, ("tiny", *SIZES))
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "gpt2"  # or package.module:Class for a model of your own
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 128
    config.model.dropout = 0.0
    config.model.vocab_multiple = 128  # the vocab is padded to a multiple of this on every mesh
    config.model.head = "lm"  # "none" returns activations and cannot be trained
    config.model.loss = "cross_entropy"  # or package.module:function; see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        config.optimizer.learning_rate = 3e-3
        config.train.num_steps = 300
        return config

    layers, heads, embed, positions, learning_rate = SIZES[size]
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.embed_dim = embed
    config.model.dropout = 0.1 if positions == 1024 else 0.0
    sizes.at_scale(config, sequence_length=positions, vocab_size=50257, learning_rate=learning_rate)
    return config
