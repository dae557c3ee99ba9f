"""Models with experts, each by its differences from LLaMA."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.llama import LLAMA
from convert.families.llama_tables import (
    ATTENTION_BIAS,
    KEYS,
    LATENTS,
    NORMS_BEFORE,
    SILU,
    THEIRS,
    UNTIED,
    attention_bias,
    attention_rows,
    expert_rows,
    full_every,
    heads,
    latent_attention_rows,
    rope,
    rows_ahead,
    rows_of,
    sizes,
    window,
    windows,
)
from convert.keys import Config, Key, Keys, Only
from convert.names import Row
from convert.tensor_files import Tensor
from models.text.llama import LlamaConfig

#: Keys of the loss that balances experts, which is a setting of the run here.
_OF_LOSS = ("output_router_logits", "router_aux_loss_coef")
_ROWS = rows_of(NORMS_BEFORE, mlp_rows=expert_rows())

_MIXTRAL = dataclasses.replace(
    LLAMA,
    name="MixtralForCausalLM",
    family="Mixtral",
    tried=("mistralai/Mixtral-8x7B-v0.1",),
    model_type="mixtral",
    keys=(
        *sizes(),
        rope(rope_theta=1000000.0),
        UNTIED,
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        heads(num_kv_heads=8),
        window(None),
        Key("num_local_experts", "num_experts", 8),
        Key("num_experts_per_tok", "experts_per_token", 2),
        Only("router_jitter_noise", (0.0,)),
    ),
    rows=rows_of(NORMS_BEFORE, mlp_rows=expert_rows("block_sparse_moe", ("w1", "w3", "w2"))),
    harmless=("attention_dropout", *_OF_LOSS),
    module_names=((r"\.block_sparse_moe\.", ".mlp."),),
)


def _read_no_window(hf: Config) -> dict[str, Any]:
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError(
            f"config.json has use_sliding_window={hf.get('use_sliding_window')} and "
            f"layer_types={hf.get('layer_types')}, which is not supported; all layers must be "
            "full_attention"
        )
    return {"sliding_window": None, "layer_types": ()}


_NO_WINDOW = Keys(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    _read_no_window,
    lambda fields: {"use_sliding_window": False},
    "`use_sliding_window`: false",
)
#: Layers without experts are supported only before all others, and these models have none there.
_ALL_SPARSE = (Only("decoder_sparse_step", (1,)), Only("mlp_only_layers", ([],)))


def _count(default: int) -> Keys:
    """Return the key with the number of experts, which has two names; files have the first one."""
    names = ("num_experts", "num_local_experts")
    return Keys(
        names,
        lambda hf: {"num_experts": next((hf[n] for n in names if hf.get(n)), default)},
        lambda fields: {"num_experts": fields["num_experts"]},
    )


_QWEN2_MOE = dataclasses.replace(
    LLAMA,
    name="Qwen2MoeForCausalLM",
    family="Qwen 1.5 and 2 with experts",
    tried=("Qwen/Qwen1.5-MoE-A2.7B",),
    model_type="qwen2_moe",
    keys=(
        *KEYS,
        heads(num_kv_heads=16),
        Key("qkv_bias", "qkv_bias", True),
        _NO_WINDOW,
        _count(60),
        Key("num_experts_per_tok", "experts_per_token", 4),
        Key("moe_intermediate_size", "expert_dim", 1408),
        Key("shared_expert_intermediate_size", "shared_expert_dim", 5632),
        Key("norm_topk_prob", "router_normalizes", False),
        *_ALL_SPARSE,
    ),
    rows=_ROWS,
    fields={"head": "lm", "shared_expert_gate": True},
    harmless=("attention_dropout", *_OF_LOSS),
)
_QWEN3_MOE = dataclasses.replace(
    LLAMA,
    name="Qwen3MoeForCausalLM",
    family="Qwen 3 with experts",
    tried=("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
    model_type="qwen3_moe",
    keys=(
        *KEYS,
        heads(num_kv_heads=4),
        ATTENTION_BIAS,
        _NO_WINDOW,
        _count(128),
        Key("num_experts_per_tok", "experts_per_token", 8),
        Key("moe_intermediate_size", "expert_dim", 768),
        Key("norm_topk_prob", "router_normalizes", False),
        *_ALL_SPARSE,
    ),
    rows=_ROWS,
    fields={"head": "lm", "qk_norm": True},
    harmless=("attention_dropout", *_OF_LOSS),
)
_OLMOE = dataclasses.replace(
    LLAMA,
    name="OlmoeForCausalLM",
    family="OLMoE",
    tried=("allenai/OLMoE-1B-7B-0924",),
    model_type="olmoe",
    keys=(
        *sizes(),
        rope(),
        UNTIED,
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        heads(),
        ATTENTION_BIAS,
        _count(64),
        Key("num_experts_per_tok", "experts_per_token", 8),
        Key("norm_topk_prob", "router_normalizes", False),
        Only("clip_qkv", (None,)),
    ),
    rows=_ROWS,
    fields={"head": "lm", "qk_norm": True, "qk_norm_over_heads": True},
    harmless=("attention_dropout", *_OF_LOSS),
)


def _deepseek_experts(defaults: Config, methods: Mapping[str, bool], **fields: Any) -> Keys:
    """Return the keys of experts, which the first layers do not have.

    Args:
        defaults: keys and their values if they are absent.
        methods: value of `topk_method` -> whether a token is restricted to some groups; the first
            one is the value if the key is absent.
        **fields: fields that all models with experts of this family have.
    """

    def read(hf: Config) -> dict[str, Any]:
        values = {**defaults, **{name: value for name, value in hf.items() if value is not None}}
        method = hf.get("topk_method") or next(iter(methods))
        if method not in methods:
            raise ValueError(
                f"config.json has topk_method={method!r}, which is not supported; the supported "
                f"values are {', '.join(methods)}"
            )
        groups = values["n_group"] if methods[method] else 1
        expert_dim = values["moe_intermediate_size"]
        read_fields = {
            "num_experts": values["n_routed_experts"],
            "experts_per_token": values["num_experts_per_tok"],
            "expert_dim": expert_dim,
            "shared_expert_dim": values["n_shared_experts"] * expert_dim,
            "dense_layers": values["first_k_dense_replace"],
            "router_normalizes": values["norm_topk_prob"],
            "router_scale": float(values["routed_scaling_factor"]),
            "router_groups": groups,
            "router_groups_per_token": values["topk_group"] if groups > 1 else 1,
            **fields,
        }
        if fields.get("balancing_bias"):
            read_fields["router_group_scores"] = 2 if groups > 1 else 1
        if read_fields["dense_layers"] < values["num_hidden_layers"]:
            return read_fields
        return {name: getattr(LlamaConfig, name) for name in read_fields}

    def write(written: Config) -> dict[str, Any]:
        if written["num_experts"] is None:
            return {"first_k_dense_replace": written["num_layers"]}
        expert_dim = written["expert_dim"] or written["mlp_dim"]
        has_groups = written["router_groups"] > 1
        return {
            "first_k_dense_replace": written["dense_layers"],
            "n_routed_experts": written["num_experts"],
            "num_experts_per_tok": written["experts_per_token"],
            "moe_intermediate_size": expert_dim,
            "n_shared_experts": (written["shared_expert_dim"] or 0) // expert_dim,
            "norm_topk_prob": written["router_normalizes"],
            "routed_scaling_factor": written["router_scale"],
            "n_group": written["router_groups"],
            "topk_group": written["router_groups_per_token"],
            "topk_method": next(
                method for method, groups in methods.items() if groups or not has_groups
            ),
        }

    rule = f"`topk_method`: {' or '.join(methods)}"
    return Keys((*defaults, "topk_method"), read, write, rule)


def _no_biases_of_experts() -> Keys:
    """Return the key of biases of MLPs, which experts cannot have."""

    def read(hf: Config) -> dict[str, Any]:
        has_bias = bool(hf.get("mlp_bias"))
        if has_bias and hf.get("first_k_dense_replace", 0) < hf["num_hidden_layers"]:
            raise ValueError(
                "config.json has mlp_bias=True, which is not supported for layers with experts; "
                "it must be False"
            )
        return {"mlp_bias": has_bias}

    write = Key("mlp_bias", "mlp_bias", False).write
    return Keys(("mlp_bias",), read, write, "`mlp_bias`: false, with experts")


_DEEPSEEK2 = dataclasses.replace(
    LLAMA,
    name="DeepseekV2ForCausalLM",
    family="DeepSeek-V2",
    tried=("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2"),
    model_type="deepseek_v2",
    keys=(
        *KEYS,
        LATENTS,
        ATTENTION_BIAS,
        _deepseek_experts(
            {
                "first_k_dense_replace": 0,
                "n_routed_experts": 64,
                "num_experts_per_tok": None,
                "moe_intermediate_size": 1407,
                "n_shared_experts": 2,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
            },
            {"greedy": False, "group_limited_greedy": True},
        ),
        Only("norm_topk_prob", (False,)),
        Only("scoring_func", ("softmax",)),
        Only("moe_layer_freq", (1,)),
        _no_biases_of_experts(),
    ),
    rows=rows_of(NORMS_BEFORE, attention_rows=latent_attention_rows, mlp_rows=expert_rows()),
    fields={"head": "lm", "rotary_pairs": "neighbours"},
    harmless=(
        *LLAMA.harmless,
        *_OF_LOSS,
        "aux_loss_alpha",
        "ep_size",
        "head_dim",
        "qk_head_dim",
        "seq_aux",
    ),
)

#: Pattern of the names of the layer after the last one, which predicts the token after the next.
#: A base model has no loss, so it leaves it out.
_FURTHER_LAYERS = r"(model\.)?layers\.{num_layers}\."
#: Keys with the number of these layers; transformers writes the second one.
_NUM_AHEAD = Keys(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    lambda hf: {"mtp_depths": hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0},
    lambda fields: {"num_nextn_predict_layers": fields["mtp_depths"]},
)


def _detect_ahead(tensors: Mapping[str, Tensor], hf: Config) -> dict[str, Any]:
    """Return whether the files have the layers that config.json announces.

    transformers keeps the key, but neither reads nor writes their weights.
    """
    name = f"model.layers.{hf['num_hidden_layers']}.eh_proj.weight"
    return {} if name in tensors else {"mtp_depths": 0}


_DEEPSEEK3 = dataclasses.replace(
    _DEEPSEEK2,
    name="DeepseekV3ForCausalLM",
    family="DeepSeek-V3 and R1",
    tried=("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
    model_type="deepseek_v3",
    keys=(
        *KEYS,
        LATENTS,
        ATTENTION_BIAS,
        Key("rope_interleave", "rotary_pairs", True, {True: "neighbours", False: "halves"}),
        _deepseek_experts(
            {
                "first_k_dense_replace": 3,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
            },
            {"noaux_tc": True},
            router_scores="sigmoid",
            balancing_bias=True,
        ),
        Only("scoring_func", ("sigmoid",)),
        Only("moe_layer_freq", (1,)),
        _NUM_AHEAD,
    ),
    rows=(
        *_DEEPSEEK2.rows,
        *rows_ahead(NORMS_BEFORE, (), latent_attention_rows, expert_rows()),
    ),
    fields={"head": "lm"},
    other_heads=(_FURTHER_LAYERS,),
    detect=_detect_ahead,
)
_GLM4_MOE = dataclasses.replace(
    LLAMA,
    name="Glm4MoeForCausalLM",
    family="GLM-4.5 and 4.6",
    tried=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.5"),
    model_type="glm4_moe",
    keys=(
        *sizes(),
        rope(rotary_fraction=0.5),
        UNTIED,
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        heads(num_kv_heads=8),
        Key("attention_bias", "qkv_bias", False),
        Key("use_qk_norm", "qk_norm", False),
        _deepseek_experts(
            {
                "first_k_dense_replace": 1,
                "n_routed_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1408,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
            },
            {"noaux_tc": True},
            router_scores="sigmoid",
            balancing_bias=True,
        ),
        _NUM_AHEAD,
    ),
    rows=(*_ROWS, *rows_ahead(NORMS_BEFORE, (), attention_rows, expert_rows())),
    harmless=("attention_dropout", *_OF_LOSS),
    other_heads=(_FURTHER_LAYERS,),
    detect=_detect_ahead,
)

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ROPE = rope(rope_theta=150000.0)


def _read_yarn(hf: Config) -> dict[str, Any]:
    has_scaling = hf.get("rope_scaling") or hf.get("rope_parameters")
    return _ROPE.read(hf if has_scaling else {**hf, "rope_scaling": _YARN})


def _write_yarn(fields: Config) -> dict[str, Any]:
    scaling = fields["rope_scaling"] or {"rope_type": "default"}
    theta = fields["rope_theta"]
    return {**_ROPE.write(fields), "rope_parameters": {"rope_theta": theta, **scaling}}


def _gpt_oss_rows(ours: str) -> tuple[Row, ...]:
    theirs = f"{THEIRS}.mlp"
    experts = f"{theirs}.experts"
    return (
        Row(f"{ours}.router", f"{theirs}.router.weight", "linear"),
        Row(f"{ours}.router_bias", f"{theirs}.router.bias"),
        *(
            Row(f"{ours}.{x}{bias}", f"{experts}.gate_up_proj{bias}", "interleaved", part=part)
            for bias in ("", "_bias")
            for part, x in enumerate(("gate", "up"))
        ),
        Row(f"{ours}.down", f"{experts}.down_proj"),
        Row(f"{ours}.down_bias", f"{experts}.down_proj_bias"),
    )


def _attention_rows_with_sinks(ours: str) -> tuple[Row, ...]:
    return (*attention_rows(ours), Row(f"{ours}.sinks", f"{THEIRS}.self_attn.sinks"))


_GPT_OSS = dataclasses.replace(
    LLAMA,
    name="GptOssForCausalLM",
    family="GPT-OSS",
    tried=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    model_type="gpt_oss",
    keys=(
        *sizes(),
        Keys(_ROPE.names, _read_yarn, _write_yarn, _ROPE.rule),
        UNTIED,
        SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        heads(num_kv_heads=8, head_dim=64),
        attention_bias(True),
        windows(full_every(2), default=128),
        Key("num_local_experts", "num_experts", 128),
        Key("num_experts_per_tok", "experts_per_token", 4),
        Key("swiglu_limit", "gate_limit", 7.0),
        Only("swiglu_alpha", (1.702,)),
    ),
    rows=rows_of(NORMS_BEFORE, attention_rows=_attention_rows_with_sinks, mlp_rows=_gpt_oss_rows),
    fields={
        "head": "lm",
        "activation": "quick_gelu",
        "attention_sinks": True,
        "expert_bias": True,
        "router_bias": True,
    },
    harmless=("attention_dropout", *_OF_LOSS, "experts_per_token", "initial_context_length"),
)

_MODELS = (_MIXTRAL, _QWEN2_MOE, _QWEN3_MOE, _OLMOE, _DEEPSEEK2, _DEEPSEEK3, _GLM4_MOE, _GPT_OSS)

ARCHITECTURES = tuple(
    architecture
    for model in _MODELS
    for architecture in (
        model,
        model.base(
            model.name.replace("ForCausalLM", "Model"),
            other_heads=(r"lm_head\.", *model.other_heads),
            fields={"mtp_depths": 0},
        ),
    )
)
