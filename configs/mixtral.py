"""A mixture of experts on one device, on the source text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 3 minutes to reach a validation
loss of about 4.19 nats per token (7.64 at the start).

    python -m train.main --config=configs/mixtral.py

`--config=configs/mixtral.py:SIZE` selects a published size, for accelerators: Mixtral, Qwen 3 with
experts, OLMoE, DeepSeek-V2 and V3, GLM-4.5 and GPT-OSS, as listed in SIZES. These need a corpus and
a tokenizer of matching size, and `mesh.expert` of more than one device.
"""

import math
from typing import Any

from ml_collections import ConfigDict

from configs import common, sizes

_MIXTRAL = {
    "vocab_size": 32000,
    "max_positions": 32768,
    "rope_theta": 1000000.0,
    "num_experts": 8,
    "router_loss": 0.02,
}
_QWEN3 = {
    "vocab_size": 151936,
    "max_positions": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_epsilon": 1e-6,
    "qk_norm": True,
    "num_experts": 128,
    "experts_per_token": 8,
    "router_loss": 0.001,  # over each row; over the batch, as in the paper, in one microbatch only
}
_OLMOE = {
    "vocab_size": 50304,
    "max_positions": 4096,
    "qk_norm": True,
    "qk_norm_over_heads": True,
    "num_experts": 64,
    "experts_per_token": 8,
    "router_normalizes": False,
    "router_loss": 0.01,
    "router_z_loss": 0.001,
}


def _yarn(**other: Any) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
    return {**scaling, "original_max_position_embeddings": 4096, **other}


def _deepseek(mscale: float) -> dict[str, Any]:
    """Return what DeepSeek-V2 and V3 share; YaRN also scales the products of queries and keys."""
    scaling = _yarn(factor=40, mscale=mscale, mscale_all_dim=mscale)
    return {
        "max_positions": 163840,
        "rms_norm_epsilon": 1e-6,
        "rotary_pairs": "neighbours",
        "rope_scaling": scaling,
        "attention_scale": 192**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2,
        "latent_dim": 512,
        "value_dim": 128,
    }


_DEEPSEEK2_LITE = _deepseek(0.707) | {
    "vocab_size": 102400,
    "num_experts": 64,
    "experts_per_token": 6,
    "expert_dim": 1408,
    "shared_expert_dim": 2816,
    "dense_layers": 1,
    "router_normalizes": False,
    "router_loss": 0.001,
}
_DEEPSEEK3 = _deepseek(1.0) | {
    "vocab_size": 129280,
    "query_latent_dim": 1536,
    "num_experts": 256,
    "experts_per_token": 8,
    "expert_dim": 2048,
    "shared_expert_dim": 2048,
    "dense_layers": 3,
    "router_scores": "sigmoid",
    "router_scale": 2.5,
    "router_groups": 8,
    "router_groups_per_token": 4,
    "router_group_scores": 2,
    "balancing_bias": True,
    "balancing_rate": 0.001,
    "router_loss": 0.0001,
}
_GLM45_AIR = {
    "vocab_size": 151552,
    "max_positions": 131072,
    "rope_theta": 1000000.0,
    "rotary_fraction": 0.5,
    "qkv_bias": True,
    "num_experts": 128,
    "experts_per_token": 8,
    "expert_dim": 1408,
    "shared_expert_dim": 1408,
    "dense_layers": 1,
    "router_scores": "sigmoid",
    "balancing_bias": True,
    "balancing_rate": 0.001,
    "router_loss": 0.0001,
}
_GPT_OSS = {
    "vocab_size": 201088,
    "max_positions": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": _yarn(factor=32.0, truncate=False),
    "qkv_bias": True,
    "out_bias": True,
    "attention_sinks": True,
    "layer_types": ("window", "full"),
    "sliding_window": 128,
    "activation": "quick_gelu",
    "gate_limit": 7.0,
    "expert_bias": True,
    "router_bias": True,
    "experts_per_token": 4,
    "router_loss": 0.01,
}

#: name -> (layers, heads, key-value heads, head dim, embed dim, mlp dim, learning rate, other keys
#: of `model`): the published config.json. Losses and rates that balance experts: Jiang et al. 2024
#: (arXiv:2401.04088) and its config.json; Yang et al. 2025 (arXiv:2505.09388); Muennighoff et al.
#: 2024 (arXiv:2409.02060); DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2.
SIZES: dict[str, tuple[int, int, int, int, int, int, float, dict[str, Any]]] = {
    "mixtral-8x7b": (32, 32, 8, 128, 4096, 14336, 3e-4, _MIXTRAL),
    "qwen3-30b-a3b": (48, 32, 4, 128, 2048, 6144, 3e-4, _QWEN3 | {"expert_dim": 768}),
    "qwen3-235b-a22b": (94, 64, 4, 128, 4096, 12288, 1.5e-4, _QWEN3 | {"expert_dim": 1536}),
    "olmoe-1b-7b": (16, 16, 16, 128, 2048, 1024, 4e-4, _OLMOE),
    "deepseek-v2-lite": (27, 16, 16, 128, 2048, 10944, 4.2e-4, _DEEPSEEK2_LITE),
    "deepseek-v3": (61, 128, 128, 128, 7168, 18432, 2.2e-4, _DEEPSEEK3),
    "glm4.5-air": (46, 96, 8, 128, 4096, 10944, 2.5e-4, _GLM45_AIR),
    "gpt-oss-20b": (24, 64, 8, 64, 2880, 2880, 3e-4, _GPT_OSS | {"num_experts": 32}),
    "gpt-oss-120b": (36, 64, 8, 64, 2880, 2880, 1.5e-4, _GPT_OSS | {"num_experts": 128}),
}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("mixtral", size, ("tiny", *SIZES))
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "llama"
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.model.embed_dim = 128
    config.model.mlp_dim = 172
    config.model.num_experts = 8
    config.model.router_loss = 0.02  # factor of the loss that balances the experts' load
    config.model.head = "lm"  # "none" returns activations and cannot be trained
    config.model.loss = "cross_entropy"  # or package.module:function; see models/losses.py
    if size == "tiny":
        config.data.vocab_size = 2048
        config.optimizer.learning_rate = 3e-3
        config.train.num_steps = 300
        return config

    sizes.decoder_at_scale(config, SIZES[size])
    return config
