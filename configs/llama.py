"""LLaMA on one device, on the source text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 1 minute to reach a validation loss
of about 3.96 nats per token (7.64 at the start).

    python -m train.main --config=configs/llama.py

`--config=configs/llama.py:SIZE` selects a published size of the family, for accelerators: LLaMA 1,
2 and 3, Mistral, and Qwen 2, 2.5 and 3, as listed in SIZES. These need a corpus and a tokenizer of
matching size.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common, sizes

_LLAMA1 = {"vocab_size": 32000, "max_positions": 2048}
_LLAMA2 = {"vocab_size": 32000, "max_positions": 4096}
_LLAMA3 = {"vocab_size": 128256, "max_positions": 8192, "rope_theta": 500000.0}
_QWEN2 = {
    "vocab_size": 151936,
    "max_positions": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_epsilon": 1e-6,
    "qkv_bias": True,
}
_QWEN25 = _QWEN2 | {"vocab_size": 152064, "rms_norm_epsilon": 1e-5}
_QWEN3 = _QWEN2 | {"max_positions": 40960, "qkv_bias": False, "qk_norm": True}
_MISTRAL = {"vocab_size": 32000, "max_positions": 32768, "sliding_window": 4096}
_TIED = {"tie_embeddings": True}


def _llama32(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return _LLAMA3 | {"max_positions": 131072, "rope_scaling": scaling}


#: name -> (layers, heads, key-value heads, head dim, embed dim, mlp dim, learning rate, other keys
#: of `model`). LLaMA 1: Touvron et al. 2023 (arXiv:2302.13971), table 2. LLaMA 2: Touvron et al.
#: 2023 (arXiv:2307.09288), table 1. LLaMA 3: Grattafiori et al. 2024 (arXiv:2407.21783), table 3.
#: Others: the published config.json.
SIZES: dict[str, tuple[int, int, int, int, int, int, float, dict[str, Any]]] = {
    "1-7b": (32, 32, 32, 128, 4096, 11008, 3e-4, _LLAMA1 | {"rms_norm_epsilon": 1e-6}),
    "1-65b": (80, 64, 64, 128, 8192, 22016, 1.5e-4, _LLAMA1),
    "2-7b": (32, 32, 32, 128, 4096, 11008, 3e-4, _LLAMA2),
    "2-13b": (40, 40, 40, 128, 5120, 13824, 3e-4, _LLAMA2),
    "2-70b": (80, 64, 8, 128, 8192, 28672, 1.5e-4, _LLAMA2),
    "3-8b": (32, 32, 8, 128, 4096, 14336, 3e-4, _LLAMA3),
    "3-70b": (80, 64, 8, 128, 8192, 28672, 1.5e-4, _LLAMA3),
    "3.1-405b": (126, 128, 8, 128, 16384, 53248, 8e-5, _llama32(8.0)),
    "3.2-1b": (16, 32, 8, 64, 2048, 8192, 3e-4, _llama32(32.0) | _TIED),
    "3.2-3b": (28, 24, 8, 128, 3072, 8192, 3e-4, _llama32(32.0) | _TIED),
    "mistral-7b": (32, 32, 8, 128, 4096, 14336, 3e-4, _MISTRAL),
    "qwen2-0.5b": (24, 14, 2, 64, 896, 4864, 3e-4, _QWEN2 | _TIED),
    "qwen2-1.5b": (28, 12, 2, 128, 1536, 8960, 3e-4, _QWEN2 | _TIED),
    "qwen2-7b": (28, 28, 4, 128, 3584, 18944, 3e-4, _QWEN2 | {"vocab_size": 152064}),
    "qwen2.5-32b": (64, 40, 8, 128, 5120, 27648, 1.5e-4, _QWEN25),
    "qwen3-0.6b": (28, 16, 8, 128, 1024, 3072, 3e-4, _QWEN3 | _TIED),
    "qwen3-8b": (36, 32, 8, 128, 4096, 12288, 3e-4, _QWEN3),
    "qwen3-32b": (64, 64, 8, 128, 5120, 25600, 1.5e-4, _QWEN3),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("llama", size, SIZES)
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "llama"
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.model.embed_dim = 128
    config.model.mlp_dim = 344
    config.model.head = "lm"  # "none" returns activations and cannot be trained
    config.model.loss = "cross_entropy"  # or package.module:function; see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        config.optimizer.learning_rate = 3e-3
        config.train.num_steps = 300
        return config

    layers, heads, kv_heads, head_dim, embed, mlp, learning_rate, rest = SIZES[size]
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.num_kv_heads = kv_heads
    config.model.head_dim = head_dim
    config.model.embed_dim = embed
    config.model.mlp_dim = mlp
    config.model.update(rest)
    vocab_size = rest["vocab_size"]
    positions = min(rest["max_positions"], 8192)
    sizes.at_scale(
        config, sequence_length=positions, vocab_size=vocab_size, learning_rate=learning_rate
    )
    return config
