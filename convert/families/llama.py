"""LLaMA and its descendants, each by its differences from LLaMA."""

import dataclasses

from convert.architecture import Architecture
from convert.families.llama_tables import (
    ATTENTION_BIAS,
    GEMMA_KEYS,
    KEYS,
    NORMS_AFTER,
    NORMS_AROUND,
    NORMS_BEFORE,
    QWEN_WINDOW,
    SILU,
    THEIRS,
    UNTIED,
    WITHOUT_POSITIONS,
    full_every,
    heads,
    rope,
    rope_by_type,
    rows_of,
    sizes,
    window,
    windows,
)
from convert.keys import ACTIVATIONS, Key, Keys, Only
from convert.names import Row
from models.text.llama import Llama

LLAMA = Architecture(
    name="LlamaForCausalLM",
    family="LLaMA 1 to 3",
    tried=(
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "HuggingFaceTB/SmolLM2-135M",
        "01-ai/Yi-6B",
        "deepseek-ai/deepseek-llm-7b-base",
        "deepseek-ai/deepseek-coder-6.7b-base",
        "tiiuae/Falcon3-7B-Base",
    ),
    model_type="llama",
    model="llama",
    model_class=Llama,
    keys=(
        *KEYS,
        heads(),
        ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", False),
        Only("activation", (None, "swiglu")),  # in Falcon 3, as hidden_act=silu
    ),
    rows=rows_of(NORMS_BEFORE),
    prefix="model.",
    fields={"head": "lm"},
    is_generative=True,
    harmless=("attention_dropout", "pretraining_tp"),
    buffers=(r"\.rotary_emb\.inv_freq$",),
)
_MISTRAL = dataclasses.replace(
    LLAMA,
    name="MistralForCausalLM",
    family="Mistral",
    tried=(
        "mistralai/Mistral-7B-v0.1",
        "mistralai/Mistral-7B-v0.3",
        "mistralai/Ministral-8B-Instruct-2410",
    ),
    model_type="mistral",
    keys=(
        *KEYS,
        heads(num_kv_heads=8),
        window(4096),
    ),
)
_QWEN2 = dataclasses.replace(
    LLAMA,
    name="Qwen2ForCausalLM",
    family="Qwen 2 and 2.5",
    tried=(
        "Qwen/Qwen2.5-7B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    ),
    model_type="qwen2",
    keys=(*KEYS, heads(num_kv_heads=32), QWEN_WINDOW),
    fields={"head": "lm", "qkv_bias": True},
)
_QWEN3 = dataclasses.replace(
    LLAMA,
    name="Qwen3ForCausalLM",
    family="Qwen 3",
    tried=(
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-8B",
    ),
    model_type="qwen3",
    keys=(*KEYS, heads(num_kv_heads=32, head_dim=128), ATTENTION_BIAS, QWEN_WINDOW),
    fields={"head": "lm", "qk_norm": True},
)

_MINISTRAL = dataclasses.replace(
    LLAMA,
    name="MinistralForCausalLM",
    family="Ministral",
    tried=(),
    model_type="ministral",
    keys=(
        *KEYS,
        heads(num_kv_heads=8),
        windows(
            lambda hf: (
                [
                    "full_attention"
                    if hf.get("sliding_window", 4096) is None
                    else "sliding_attention"
                ]
                * hf["num_hidden_layers"]
            ),
            default=4096,
        ),
    ),
)

_OLMO2 = dataclasses.replace(
    LLAMA,
    name="Olmo2ForCausalLM",
    family="OLMo 2",
    tried=("allenai/OLMo-2-1124-7B",),
    model_type="olmo2",
    keys=(
        *sizes(),
        rope(),
        UNTIED,
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        heads(),
        ATTENTION_BIAS,
    ),
    rows=rows_of(NORMS_AFTER),
    fields={"head": "lm", "norms": "after", "qk_norm": True, "qk_norm_over_heads": True},
)
_OLMO3 = dataclasses.replace(
    _OLMO2,
    name="Olmo3ForCausalLM",
    family="OLMo 3",
    tried=("allenai/Olmo-3-1025-7B",),
    model_type="olmo3",
    keys=(
        *sizes(),
        rope_by_type(500000.0, None, "rope_window_theta"),
        UNTIED,
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        heads(),
        ATTENTION_BIAS,
        windows(full_every(4), default=4096),
    ),
)
_GRANITE = dataclasses.replace(
    LLAMA,
    name="GraniteForCausalLM",
    family="Granite 3",
    tried=(
        "ibm-granite/granite-3.1-2b-instruct",
        "ibm-granite/granite-3.3-8b-instruct",
    ),
    model_type="granite",
    keys=(
        *LLAMA.keys,
        Key("embedding_multiplier", "embedding_scale", 1.0),
        Key("attention_multiplier", "attention_scale", 1.0),
        Key("residual_multiplier", "residual_scale", 1.0),
        Keys(
            ("logits_scaling",),
            lambda hf: {"logit_scale": 1 / hf.get("logits_scaling", 1.0)},
            lambda fields: {"logits_scaling": 1 / fields["logit_scale"]},
        ),
    ),
)
_SEED_OSS = dataclasses.replace(
    LLAMA,
    name="SeedOssForCausalLM",
    family="Seed-OSS",
    tried=("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    model_type="seed_oss",
    keys=(
        *KEYS,
        heads(num_kv_heads=8, head_dim=128),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_out_bias", "out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
    ),
    harmless=(*LLAMA.harmless, "residual_dropout"),
)

_NEMOTRON = dataclasses.replace(
    LLAMA,
    name="NemotronForCausalLM",
    family="Nemotron",
    tried=(
        "nvidia/Nemotron-Mini-4B-Instruct",
        "nvidia/Minitron-4B-Base",
    ),
    model_type="nemotron",
    keys=(
        *sizes(init_stddev=0.0134),
        rope(rotary_fraction=0.5),
        heads(),
        ATTENTION_BIAS,
        UNTIED,
        Key("norm_eps", "rms_norm_epsilon", 1e-5),
        Key("mlp_bias", "mlp_bias", False),
        Key("hidden_act", "activation", "relu2", ACTIVATIONS),
    ),
    fields={"head": "lm", "norm": "layer_1p", "is_gated": False},
    harmless=(*LLAMA.harmless, "kv_channels"),  # which is head_dim in NeMo
)


def _norms_by_head(key: str) -> Keys:
    """Return the key of layer norms of queries and keys, with a scale for each head."""
    return Keys(
        (key,),
        lambda hf: {name: bool(hf.get(key)) for name in ("qk_norm", "qk_norm_by_head")},
        lambda fields: {key: fields["qk_norm"]},
    )


_STABLELM = dataclasses.replace(
    LLAMA,
    name="StableLmForCausalLM",
    family="StableLM",
    tried=(
        "stabilityai/stablelm-2-1_6b",
        "stabilityai/stablelm-3b-4e1t",
        "stabilityai/stable-code-3b",
    ),
    model_type="stablelm",
    keys=(
        *sizes(),
        rope(rotary_fraction=0.25),
        heads(),
        UNTIED,
        Key("layer_norm_eps", "rms_norm_epsilon", 1e-5),
        Key("use_qkv_bias", "qkv_bias", False),
        SILU,
        _norms_by_head("qk_layernorm"),
        Key("use_parallel_residual", "norms", False, {False: "before", True: "parallel"}),
    ),
    # Norms of queries and keys have a tensor for each head.
    rows=(
        *(
            Row(
                f"decoder.layers.attention.{x}_norm.scale",
                f"{THEIRS}.self_attn.{x}_layernorm.norms.{{head}}.weight",
            )
            for x in "qk"
        ),
        *LLAMA.rows,
    ),
    fields={"head": "lm", "norm": "layer"},
    harmless=("attention_dropout", "hidden_dropout"),
)
#: Norms of queries and keys with a scale for each head, which the files store as [heads, head_dim].
_NORMS_BY_HEAD = tuple(
    Row(f"decoder.layers.attention.{x}_norm.scale", f"{THEIRS}.self_attn.{x}_norm.weight", "same")
    for x in "qk"
)
_COHERE = dataclasses.replace(
    LLAMA,
    name="CohereForCausalLM",
    family="Command-R",
    tried=(
        "CohereForAI/c4ai-command-r-v01",
        "CohereForAI/aya-23-8B",
        "CohereForAI/c4ai-command-r-plus",
    ),
    model_type="cohere",
    keys=(
        *sizes(),
        rope(rope_theta=500000.0),
        heads(),
        ATTENTION_BIAS,
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("layer_norm_eps", "rms_norm_epsilon", 1e-5),
        Key("logit_scale", "logit_scale", 0.0625),
        SILU,
        _norms_by_head("use_qk_norm"),
    ),
    rows=(*_NORMS_BY_HEAD, *rows_of({"attention_norm": "input_layernorm"})),
    fields={
        "head": "lm",
        "norm": "layer_no_bias",
        "norms": "parallel",
        "rotary_pairs": "neighbours",
    },
)

#: Number of layers of which the last has no window, in files without the type of each layer.
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_COHERE2 = dataclasses.replace(
    _COHERE,
    name="Cohere2ForCausalLM",
    family="Command-R 7B",
    tried=("CohereLabs/c4ai-command-r7b-12-2024",),
    model_type="cohere2",
    keys=(
        *sizes(),
        rope(),
        heads(),
        ATTENTION_BIAS,
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("layer_norm_eps", "rms_norm_epsilon", 1e-5),
        Key("logit_scale", "logit_scale", 0.0625),
        SILU,
        windows(
            full_every(4, *_PATTERN, "layer_switch"),
            default=4096,
            full="no_positions",
            further_names=(*_PATTERN, "layer_switch"),
        ),
        # Published files describe the model in these words too; None is for files without them.
        Only("order_of_interleaved_layers", (None, "local_attn_first")),
        Only("position_embedding_type", (None, "rope_gptj")),
        Only("rotary_pct", (None, 1.0)),
        Only("use_gated_activation", (None, True)),
        Only("use_parallel_block", (None, True)),
    ),
    harmless=(*_COHERE.harmless, "cache_implementation", "use_embedding_sharing"),
)
_SMOLLM3 = dataclasses.replace(
    LLAMA,
    name="SmolLM3ForCausalLM",
    family="SmolLM3",
    tried=("HuggingFaceTB/SmolLM3-3B",),
    model_type="smollm3",
    keys=(
        *sizes(),
        rope(rope_theta=2000000.0),
        heads(num_kv_heads=4),
        ATTENTION_BIAS,
        Key("tie_word_embeddings", "tie_embeddings", True),
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-6),
        Key("mlp_bias", "mlp_bias", False),
        Only("use_sliding_window", (False,)),
        WITHOUT_POSITIONS,
    ),
    harmless=(*LLAMA.harmless, "sliding_window", "max_window_layers"),
)

_GEMMA2 = dataclasses.replace(
    LLAMA,
    name="Gemma2ForCausalLM",
    family="Gemma 2",
    tried=("google/gemma-2-2b",),
    model_type="gemma2",
    keys=(
        *sizes(),
        rope(),
        *GEMMA_KEYS,
        windows(full_every(2), default=4096),
        Key("attn_logit_softcapping", "attention_softcap", 50.0),
        Key("final_logit_softcapping", "logit_softcap", 30.0),
    ),
    rows=rows_of(NORMS_AROUND),
    fields={"head": "lm", "norm": "rms_1p", "norms": "around"},
    harmless=("attention_dropout", "cache_implementation", "hidden_act"),
)
_GEMMA3 = dataclasses.replace(
    _GEMMA2,
    name="Gemma3ForCausalLM",
    family="Gemma 3, text",
    tried=("google/gemma-3-1b-it",),
    model_type="gemma3_text",
    keys=(
        *sizes(),
        rope_by_type(1000000.0, 10000.0, "rope_local_base_freq"),
        *GEMMA_KEYS,
        windows(full_every(6, *_PATTERN), default=4096, further_names=_PATTERN),
        Key("attn_logit_softcapping", "attention_softcap", None),
        Key("final_logit_softcapping", "logit_softcap", None),
    ),
    fields={**_GEMMA2.fields, "qk_norm": True},
)

_PHI3 = dataclasses.replace(
    LLAMA,
    name="Phi3ForCausalLM",
    family="Phi-3 and Phi-4",
    tried=(
        "microsoft/Phi-3-mini-4k-instruct",
        "microsoft/phi-4",
        "microsoft/Phi-4-mini-instruct",
    ),
    model_type="phi3",
    keys=(
        *sizes(),
        rope(rotary_fraction=1.0),
        heads(),
        UNTIED,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        SILU,
        Only("attention_bias", (False,)),
        window(None),
    ),
    rows=rows_of(NORMS_BEFORE, ("attention", "mlp")),
    harmless=("attention_dropout", "embd_pdrop", "resid_pdrop"),
)
_GLM4 = dataclasses.replace(
    LLAMA,
    name="Glm4ForCausalLM",
    family="GLM-4",
    tried=(
        "THUDM/GLM-4-9B-0414",
        "THUDM/GLM-Z1-9B-0414",
    ),
    model_type="glm4",
    keys=(
        *sizes(),
        rope(rotary_fraction=0.5),
        heads(num_kv_heads=2, head_dim=128),
        UNTIED,
        Key("rms_norm_eps", "rms_norm_epsilon", 0.00000015625),
        Key("attention_bias", "qkv_bias", True),
        SILU,
    ),
    rows=rows_of(
        {
            **NORMS_BEFORE,
            "attention_norm_2": "post_self_attn_layernorm",
            "mlp_norm_2": "post_mlp_layernorm",
        },
        ("mlp",),
    ),
    fields={"head": "lm", "norms": "around", "rotary_pairs": "neighbours"},
    harmless=("attention_dropout",),
)

_MODELS = (
    LLAMA,
    _MISTRAL,
    _QWEN2,
    _QWEN3,
    _MINISTRAL,
    _OLMO2,
    _OLMO3,
    _GRANITE,
    _SEED_OSS,
    _NEMOTRON,
    _STABLELM,
    _COHERE,
    _COHERE2,
    _SMOLLM3,
    _GEMMA2,
    _GEMMA3,
    _PHI3,
    _GLM4,
)

#: Names of the classes without a head, where they do not end in Model instead of ForCausalLM.
_BASE_NAMES = {"Gemma3ForCausalLM": "Gemma3TextModel"}

ARCHITECTURES = tuple(
    architecture
    for model in _MODELS
    for architecture in (
        model,
        model.base(
            _BASE_NAMES.get(model.name, model.name.replace("ForCausalLM", "Model")),
            other_heads=(r"lm_head\.",),
        ),
    )
)
