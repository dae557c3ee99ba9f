"""Small models of transformers, their prompts, and their continuations, which ours must equal."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers as hf
from jax.sharding import AxisType

from generate.sampling import Sampling
from sharding.mesh import MESH_AXES

VOCAB = 211
#: Lengths of the prompts; the window of the Mistral is shorter than most of them.
LENGTHS = (3, 20, 7, 12, 1, 33, 16, 9)
NEW = 64
PAD = 1
#: The token that the decoder of a T5 begins with.
START = 0

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=3)

_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 4,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 44,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20,  # less than NEW
}
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_size": 36,
    "intermediate_size": 44,
}
_GLM4: dict[str, Any] = {**_LLAMA, "head_dim": 12}
#: One layer that sees all tokens, and two with a window: two stacks here.
_QWEN2: dict[str, Any] = {
    **_LLAMA,
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 10,
    "max_window_layers": 1,
}
_LLAMA_OF_LATENTS: dict[str, Any] = {**_LLAMA, "num_key_value_heads": 6}
#: PyTorch's products of experts need sizes that are multiples of 4.
_EXPERTS: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_DEEPSEEK: dict[str, Any] = {
    **{name: value for name, value in _LLAMA_OF_LATENTS.items() if name != "head_dim"},
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 10}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
#: Name -> function that returns a model with random weights.
MODELS: dict[str, Any] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCAB, n_positions=128, n_layer=3, n_head=4, n_embd=40)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCAB,
            max_position_embeddings=128,
            num_hidden_layers=3,
            num_attention_heads=3,
            hidden_size=39,
            word_embed_proj_dim=39,
            ffn_dim=50,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_QWEN2)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=10)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_LLAMA)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**_LLAMA, residual_multiplier=0.5)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_LLAMA, pad_token_id=PAD)),
    "glm4": lambda: hf.Glm4ForCausalLM(hf.Glm4Config(**_GLM4, pad_token_id=PAD)),
    "cohere": lambda: hf.CohereForCausalLM(
        hf.CohereConfig(**_LLAMA, pad_token_id=PAD, use_qk_norm=True)
    ),
    "cohere2": lambda: hf.Cohere2ForCausalLM(
        hf.Cohere2Config(**_LLAMA | _FOUR_LAYERS, pad_token_id=PAD)
    ),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(**_LLAMA, no_rope_layer_interval=2, pad_token_id=PAD)
    ),
    "olmo3": lambda: hf.Olmo3ForCausalLM(hf.Olmo3Config(**_LLAMA | _FOUR_LAYERS)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_LLAMA | _FOUR_LAYERS, attn_logit_softcapping=2.0)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_LLAMA | _FOUR_LAYERS, layer_types=_ALTERNATING)
    ),
    "deepseek2": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(
            **_LLAMA_OF_LATENTS,
            first_k_dense_replace=2,
            kv_lora_rank=14,
            q_lora_rank=None,
            qk_nope_head_dim=10,
            qk_rope_head_dim=4,
            v_head_dim=7,
        )
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_LLAMA, num_local_experts=6)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **{**_LLAMA, "hidden_size": 60}, **_EXPERTS, shared_expert_intermediate_size=28
        )
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_LLAMA, **_EXPERTS, norm_topk_prob=True)
    ),
    "olmoe": lambda: hf.OlmoeForCausalLM(
        hf.OlmoeConfig(
            **{**_LLAMA, "hidden_size": 60}, num_experts=7, num_experts_per_tok=3, eos_token_id=2
        )
    ),
    "deepseek2_moe": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**_DEEPSEEK, q_lora_rank=None, routed_scaling_factor=1.5)
    ),
    "deepseek3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**_DEEPSEEK, q_lora_rank=12, n_group=3, topk_group=2)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_LLAMA | _FOUR_LAYERS, num_local_experts=7, num_experts_per_tok=3, swiglu_limit=0.7
        )
    ),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(
            **_GLM4,
            n_routed_experts=9,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            use_qk_norm=True,
        )
    ),
    "switch": lambda: hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(
            **{name: value for name, value in _T5.items() if "tie" not in name},
            num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=1,
            num_experts=4,
            expert_capacity=9,  # fewer than some experts are chosen
        )
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
}


def saved(name: str, directory: Path) -> Any:
    """Save a random model whose continuations have many different tokens; return it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    model.save_pretrained(directory)
    model.generation_config = hf.GenerationConfig(pad_token_id=PAD, decoder_start_token_id=START)
    return model


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def theirs(model: Any, stop: int | None = None, **options: Any) -> list[list[int]]:
    """Return the continuations of transformers, without random choices.

    It takes prompts with padding on the left, or on the right for an encoder. The result of a
    causal model begins with its prompt, which is dropped.
    """
    width = max(LENGTHS)
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts()]
    masks = [[0] * (width - length) + [1] * length for length in LENGTHS]
    first = width
    if model.config.is_encoder_decoder:
        rows = [prompt + [PAD] * (width - len(prompt)) for prompt in prompts()]
        masks = [mask[::-1] for mask in masks]
        first = 1
    found = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(masks),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=stop,
        **options,
    )
    continuations = found[:, first:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in continuations]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    axes = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    mesh_axes = [*axes.values()], [*axes]
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    return jax.make_mesh(*mesh_axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)
