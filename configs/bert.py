"""BERT on one device: masked tokens, and which text follows which, in Python's standard library.

Hardware: any; by default a 2-core CPU takes about 3 minutes to a validation loss of about 5.57
nats a masked token (7.7 at the start), and to telling in 74 % of the pairs whether they belong
together.

    python -m train.main --config=configs/bert.py

`--config=configs/bert.py:SIZE` is a published size, for accelerators: mini, small, medium, base
and large. They are meant for a corpus and a tokenizer of their size.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, sizes

#: name -> (layers, heads, embed dim). Devlin et al. 2018 (arXiv:1810.04805), section 3, and the
#: smaller ones Turc et al. 2019 (arXiv:1908.08962), table 1.
SIZES = {
    "mini": (4, 4, 256),
    "small": (4, 8, 512),
    "medium": (8, 8, 512),
    "base": (12, 12, 768),
    "large": (24, 16, 1024),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Returns the config; `size` is "tiny" or a key of SIZES."""
    sizes.choose("bert", size, SIZES)
    config = common.get_config()
    config.data.objective = "masked_lm_pairs"
    config.model = ConfigDict()
    config.model.name = "bert"
    config.model.head = "pretraining"  # masked_lm | pretraining | sequence
    config.model.vocab_size = placeholder(int)  # None: the tokenizer's
    config.model.max_positions = placeholder(int)  # None: data.sequence_length
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.dropout = 0.0
    config.model.num_labels = placeholder(int)  # of the heads sequence and token; None: the data's
    config.model.loss = "cross_entropy"  # or package.module:function, see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        # With norms after the residual sums, larger rates never leave the frequencies of tokens.
        config.optimizer.learning_rate = 1e-3
        config.optimizer.warmup_steps = 60
        config.train.num_steps = 600
        return config

    layers, heads, embed = SIZES[size]
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.embed_dim = embed
    config.model.mlp_dim = 4 * embed
    config.model.dropout = 0.1
    config.optimizer.schedule = "linear"
    config.optimizer.final_learning_rate_fraction = 0.0
    sizes.at_scale(config, sequence_length=512, vocab_size=30522, learning_rate=1e-4)
    return config
