"""T5 on one device: span corruption on the source text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 1 minute to reach a validation loss
of about 4.25 nats per token of the spans (8.22 at the start).

    python -m train.main --config=configs/t5.py

`--config=configs/t5.py:SIZE` selects a published size, for accelerators: small, base, large, 3b or
11b for T5 1.0, v1.1-small to v1.1-xxl for T5 1.1, mt5-small to mt5-xxl for mT5, and switch-base-8
to switch-large-128 for Switch Transformers with so many experts. These need a corpus and a
tokenizer of matching size.
"""

from ml_collections import ConfigDict

from configs import common, sizes

#: T5 1.0: name -> (layers of the encoder and of the decoder, heads, head dim, embed dim, mlp dim).
#: Raffel et al. 2019 (arXiv:1910.10683), section 3.7.
ORIGINAL = {
    "small": (6, 8, 64, 512, 2048),
    "base": (12, 12, 64, 768, 3072),
    "large": (24, 16, 64, 1024, 4096),
    "3b": (24, 32, 128, 1024, 16384),
    "11b": (24, 128, 128, 1024, 65536),
}
#: T5 1.1 and mT5, whose MLPs are gated: the same, from the published config.json.
GATED = {
    "small": (8, 6, 64, 512, 1024),
    "base": (12, 12, 64, 768, 2048),
    "large": (24, 16, 64, 1024, 2816),
    "xl": (24, 32, 64, 2048, 5120),
    "xxl": (24, 64, 64, 4096, 10240),
}
#: Switch Transformers: name -> number of experts. All other sizes are like a T5 1.0's.
EXPERTS = {
    **{f"switch-base-{count}": count for count in (8, 16, 32, 64, 128, 256)},
    "switch-large-128": 128,
}
SIZES = (
    ORIGINAL
    | {name: ORIGINAL[name.split("-")[1]] for name in EXPERTS}
    | {f"v1.1-{name}": size for name, size in GATED.items()}
    | {f"mt5-{name}": size for name, size in GATED.items()}
)


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("t5", size, ("tiny", *SIZES))
    config = common.get_config()
    config.data.objective = "span_corruption"
    config.model = ConfigDict()
    config.model.name = "t5"
    config.model.num_layers = 3  # encoder layers
    config.model.num_decoder_layers = 3
    config.model.num_heads = 4
    config.model.head_dim = 32
    config.model.embed_dim = 128
    config.model.mlp_dim = 344
    config.model.dropout = 0.0
    config.model.activation = "gelu_tanh"
    config.model.is_gated = True
    config.model.tie_embeddings = False
    config.model.scale_outputs = False  # scale activations by 1 / √embed_dim before the head
    config.model.loss = "cross_entropy"  # or package.module:function; see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        config.optimizer.learning_rate = 3e-3
        config.train.num_steps = 300
        return config

    layers, heads, head_dim, embed, mlp = SIZES[size]
    config.model.num_layers = layers
    config.model.num_decoder_layers = layers
    config.model.num_heads = heads
    config.model.head_dim = head_dim
    config.model.embed_dim = embed
    config.model.mlp_dim = mlp
    if size in EXPERTS:
        config.model.num_experts = EXPERTS[size]  # in every second layer
        config.model.experts_per_token = 1
        config.model.expert_capacity_tokens = 64
        config.model.router_normalizes = False
        config.model.router_loss = 0.001
        config.model.router_z_loss = 0.001
    if size in ORIGINAL or size in EXPERTS:
        config.model.activation = "relu"
        config.model.is_gated = False
        config.model.tie_embeddings = True
        config.model.scale_outputs = True
        config.model.dropout = 0.1
    vocab_size = 250112 if size.startswith("mt5-") else 32128
    sizes.at_scale(config, sequence_length=512, vocab_size=vocab_size, learning_rate=1e-3)
    return config
