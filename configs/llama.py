"""LLaMA on one device, on the source text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 1 minute to reach a validation loss
of about 3.83 nats per token (7.64 at the start).

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
_OLMO2 = {
    "vocab_size": 100352,
    "max_positions": 4096,
    "rope_theta": 500000.0,
    "rms_norm_epsilon": 1e-6,
    "norms": "after",
    "qk_norm": True,
    "qk_norm_over_heads": True,
}
_OLMO3 = _OLMO2 | {
    "vocab_size": 100278,
    "max_positions": 65536,
    "layer_types": ("window", "window", "window", "full"),
    "sliding_window": 4096,
    "window_rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
_GEMMA2 = _TIED | {
    "vocab_size": 256000,
    "max_positions": 8192,
    "rms_norm_epsilon": 1e-6,
    "activation": "gelu_tanh",
    "norm": "rms_1p",
    "norms": "around",
    "embedding_scale": 48.0,  # √embed_dim
    "layer_types": ("window", "full"),
    "sliding_window": 4096,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262144,
    "max_positions": 32768,
    "rope_theta": 1000000.0,
    "embedding_scale": 1152**0.5,
    "layer_types": ("window", "window", "window", "window", "window", "full"),
    "sliding_window": 512,
    "window_rope_theta": 10000.0,
    "attention_softcap": None,
    "logit_softcap": None,
    "qk_norm": True,
}
_SMOLLM3 = _TIED | {
    "vocab_size": 128256,
    "max_positions": 65536,
    "rope_theta": 5000000.0,
    "rms_norm_epsilon": 1e-6,
    "layer_types": ("full", "full", "full", "no_positions"),
}
_GRANITE = _TIED | {
    "vocab_size": 49155,
    "max_positions": 131072,
    "rope_theta": 5000000.0,
    "embedding_scale": 12.0,
    "attention_scale": 0.015625,
    "residual_scale": 0.22,
    "logit_scale": 0.125,
}
_PHI4 = {"vocab_size": 100352, "max_positions": 16384, "rope_theta": 250000.0}
_GLM4 = {
    "vocab_size": 151552,
    "max_positions": 32768,
    "rotary_fraction": 0.5,
    "rotary_pairs": "neighbours",
    "norms": "around",
}
_NEMOTRON = {
    "vocab_size": 256000,
    "max_positions": 4096,
    "init_stddev": 0.0134,
    "rotary_fraction": 0.5,
    "activation": "relu2",
    "is_gated": False,
    "norm": "layer_1p",
}
_STABLELM2 = {
    "vocab_size": 100352,
    "max_positions": 4096,
    "rotary_fraction": 0.25,
    "qkv_bias": True,
    "norm": "layer",
}
_COMMAND_R7B = _TIED | {
    "vocab_size": 256000,
    "max_positions": 8192,
    "rope_theta": 50000.0,
    "logit_scale": 0.25,
    "layer_types": ("window", "window", "window", "no_positions"),
    "sliding_window": 4096,
    "norm": "layer_no_bias",
    "norms": "parallel",
    "rotary_pairs": "neighbours",
}
_SEED_OSS = {
    "vocab_size": 155136,
    "max_positions": 524288,
    "rope_theta": 10000000.0,
    "rms_norm_epsilon": 1e-6,
    "qkv_bias": True,
}


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
    "olmo2-7b": (32, 32, 32, 128, 4096, 11008, 3e-4, _OLMO2),
    "olmo3-7b": (32, 32, 32, 128, 4096, 11008, 3e-4, _OLMO3),
    "gemma2-2b": (26, 8, 4, 256, 2304, 9216, 3e-4, _GEMMA2),
    "gemma3-1b": (26, 4, 1, 256, 1152, 6912, 3e-4, _GEMMA3),
    "smollm3-3b": (36, 16, 4, 128, 2048, 11008, 2e-4, _SMOLLM3),
    "granite3.1-2b": (40, 32, 8, 64, 2048, 8192, 3e-4, _GRANITE),
    "phi4-14b": (40, 40, 10, 128, 5120, 17920, 3e-4, _PHI4),
    "glm4-9b": (40, 32, 2, 128, 4096, 13696, 3e-4, _GLM4),
    "nemotron-4b": (32, 24, 8, 128, 3072, 9216, 3e-4, _NEMOTRON),
    "stablelm2-1.6b": (24, 32, 32, 64, 2048, 5632, 3e-4, _STABLELM2),
    "command-r7b": (32, 32, 8, 128, 4096, 14336, 3e-4, _COMMAND_R7B),
    "seed-oss-36b": (64, 80, 8, 128, 5120, 27648, 1.5e-4, _SEED_OSS),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("llama", size, ("tiny", *SIZES))
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

    sizes.decoder_at_scale(config, SIZES[size])
    return config
