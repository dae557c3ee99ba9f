"""BERT pretraining on one device, on the source text of Python's own standard library.

The model learns masked tokens and next-sentence prediction.

Hardware: any. With the default size, a 2-core CPU takes about 3 minutes to reach a validation loss
of about 5.57 nats per masked token (7.7 at the start), and then classifies 74 % of the text pairs
correctly.

    python -m train.main --config=configs/bert.py

`--config=configs/bert.py:SIZE` selects a published size, for accelerators: mini, small, medium,
base or large, or modernbert-base or modernbert-large, which learn masked tokens only. These need a
corpus and a tokenizer of matching size.
"""

from ml_collections import ConfigDict

from configs import common, sizes

#: name -> (layers, heads, embed dim, MLP dim). Devlin et al. 2018 (arXiv:1810.04805), section 3;
#: the smaller sizes: Turc et al. 2019 (arXiv:1908.08962), table 1; ModernBERT: Warner et al. 2024
#: (arXiv:2412.13663), section 2.1.3.
SIZES = {
    "mini": (4, 4, 256, 1024),
    "small": (4, 8, 512, 2048),
    "medium": (8, 8, 512, 2048),
    "base": (12, 12, 768, 3072),
    "large": (24, 16, 1024, 4096),
    "modernbert-base": (22, 12, 768, 1152),
    "modernbert-large": (28, 16, 1024, 2624),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("bert", size, ("tiny", *SIZES))
    config = common.get_config()
    config.data.objective = "masked_lm_pairs"
    config.model = ConfigDict()
    config.model.name = "bert"
    config.model.head = "pretraining"  # masked_lm | pretraining | sequence
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.dropout = 0.0
    config.model.loss = "cross_entropy"  # or package.module:function; see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        # The default learning rate, 1e-3: BERT normalizes after the residual sums, and with a
        # larger rate such a model never learns more than token frequencies.
        config.optimizer.warmup_steps = 60
        config.train.num_steps = 600
        return config

    layers, heads, embed, mlp = SIZES[size]
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.embed_dim = embed
    config.model.mlp_dim = mlp
    if size.startswith("modernbert"):
        config.data.objective = "masked_lm"
        config.data.mask_fraction = 0.3
        config.model.name = "modernbert"
        config.model.head = "masked_lm"
        config.optimizer.weight_decay = 1e-5
        learning_rate = 8e-4 if size.endswith("base") else 5e-4
        sizes.at_scale(config, sequence_length=1024, vocab_size=50368, learning_rate=learning_rate)
        return config

    config.model.dropout = 0.1
    config.optimizer.schedule = "linear"
    config.optimizer.final_learning_rate_fraction = 0.0
    sizes.at_scale(config, sequence_length=512, vocab_size=30522, learning_rate=1e-4)
    return config
