"""Keys and weight names of LLaMA and its descendants, each by what differs from LLaMA."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from convert.architecture import Architecture
from convert.keys import ACTIVATIONS, Config, Key, Keys, Only
from convert.names import Row
from convert.names import norm as norm_rows
from models.text.llama import Llama
from untrusted.schema import check

_THEIRS = "model.layers.{layer}"


#: Norm of a block -> its name in the files, for norms before the branches and after them.
_NORMS_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_AFTER = {
    "attention_norm_2": "post_attention_layernorm",
    "mlp_norm_2": "post_feedforward_layernorm",
}


#: The linear layers that some files store as one.
_FUSED = {
    "attention": ("self_attn.qkv_proj", "qkv"),
    "mlp": ("mlp.gate_up_proj", ("gate", "up")),
}


def _fused_rows(ours: str, *branches: str) -> tuple[Row, ...]:
    """Return the rows of linear layers that are stored as one.

    Args:
        ours: path of the blocks.
        *branches: keys of _FUSED.
    """
    return tuple(
        Row(f"{ours}.{branch}.{x}.{word}", f"{_THEIRS}.{theirs}.{suffix}", part=part)
        for branch in branches
        for theirs, layers in [_FUSED[branch]]
        for part, x in enumerate(layers)
        for word, suffix in (("kernel", "weight"), ("bias", "bias"))
    )


def _block_rows(ours: str, norms: Mapping[str, str], fused: Sequence[str]) -> tuple[Row, ...]:
    attention = f"{ours}.attention"
    return (
        *_fused_rows(ours, *fused),  # instead of the rows of the same parameters below
        *(
            Row(f"{ours}.{norm}.{word}", f"{_THEIRS}.{theirs}.{suffix}")
            for norm, theirs in norms.items()
            for word, suffix in (("scale", "weight"), ("bias", "bias"))
            if word == "scale" or not norm.endswith("_2")  # these are RMS norms in all families
        ),
        *(
            Row(f"{attention}.{x}.{word}", f"{_THEIRS}.self_attn.{x}_proj.{suffix}")
            for x in "qkv"
            for word, suffix in (("kernel", "weight"), ("bias", "bias"))
        ),
        Row(f"{attention}.q_norm.scale", f"{_THEIRS}.self_attn.q_norm.weight"),
        Row(f"{attention}.k_norm.scale", f"{_THEIRS}.self_attn.k_norm.weight"),
        Row(f"{attention}.out.kernel", f"{_THEIRS}.self_attn.o_proj.weight", num_inputs=2),
        Row(f"{attention}.out.bias", f"{_THEIRS}.self_attn.o_proj.bias"),
        *(
            Row(f"{ours}.mlp.{x}.{word}", f"{_THEIRS}.mlp.{x}_proj.{suffix}")
            for x in ("gate", "up", "down")
            for word, suffix in (("kernel", "weight"), ("bias", "bias"))
        ),
    )


def _rows(norms: Mapping[str, str], fused: Sequence[str] = ()) -> tuple[Row, ...]:
    """Return the rows of a model.

    Args:
        norms: norm of a block -> its name in the files.
        fused: keys of _FUSED.
    """
    return (
        Row("token_embedding", "model.embed_tokens.weight", "vocab", tied=("lm_head.weight",)),
        *_block_rows("decoder.layers", norms, fused),
        *_block_rows("windowed_decoder.layers", norms, fused),
        *norm_rows("final_norm", "model.norm"),
        Row("output_embedding", "lm_head.weight", "vocab"),
    )


def _heads(*, num_kv_heads: int | None = None, head_dim: int | None = None) -> Keys:
    """Return the keys with the number of kv heads and the size of heads.

    Args:
        num_kv_heads: number of kv heads if the key is absent; None for the number of heads.
        head_dim: size of a head if the key is absent; None for hidden_size / heads.
    """

    def read(hf: Config) -> dict[str, Any]:
        heads = hf["num_attention_heads"]
        kv_heads = hf.get("num_key_value_heads", num_kv_heads)
        size = hf.get("head_dim", head_dim)
        return {
            "num_kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": hf["hidden_size"] // heads if size is None else size,
        }

    def write(fields: Config) -> dict[str, Any]:
        return {"num_key_value_heads": fields["num_kv_heads"], "head_dim": fields["head_dim"]}

    return Keys(("num_key_value_heads", "head_dim"), read, write)


def _read_rope(hf: Config, *, rope_theta: float, rotary_fraction: float | None) -> dict[str, Any]:
    """Read the keys about rotary positions.

    Args:
        rope_theta: base of the wavelengths if the key is absent.
        rotary_fraction: share of a head's features that are rotated if the key is absent; None:
            only models that rotate all features.
    """
    for name in ("rope_scaling", "rope_parameters"):
        check(hf.get(name), dict[str, Any] | None, f"config.json: {name}")
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(
            f"config.json has rope_parameters={scaling}, which must be the same for all layers"
        )
    theta = _first(scaling.pop("rope_theta", None), hf.get("rope_theta"), rope_theta)
    rotated = _first(
        scaling.pop("partial_rotary_factor", None),
        hf.get("partial_rotary_factor"),
        rotary_fraction,
        1.0,
    )
    if rotary_fraction is None and rotated != 1.0:
        raise ValueError(
            f"config.json has partial_rotary_factor={rotated}, which is not supported; it must be "
            "1, that is, all features of a head are rotated"
        )
    old_name = scaling.pop("type", "default")
    kind = scaling.setdefault("rope_type", old_name)
    if kind == "su":  # the first name of longrope, in Phi-3's files
        kind = scaling["rope_type"] = "longrope"
    fields = {"rope_theta": float(theta), "rotary_fraction": float(rotated)}
    if kind == "default":
        return {**fields, "rope_scaling": None}
    key = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope"):
        scaling[key] = hf.get(key) or scaling.get(key) or hf["max_position_embeddings"]
    elif kind == "dynamic":
        scaling.pop(key, None)
    scaling = {name: value for name, value in scaling.items() if value is not None}
    return {**fields, "rope_scaling": scaling}


def _first(*values: Any) -> Any:
    """Return the first value that is not None; 0 is a value, which the model refuses."""
    return next(value for value in values if value is not None)


def _write_rope(fields: Config) -> dict[str, Any]:
    scaling = fields["rope_scaling"]
    keys = {
        "rope_theta": fields["rope_theta"],
        "rope_scaling": None if scaling is None else dict(scaling),
        "partial_rotary_factor": fields["rotary_fraction"],
    }
    if scaling is not None and scaling["rope_type"] == "longrope":
        # Phi-3 reads it only there, and has a default for it.
        name = "original_max_position_embeddings"
        keys[name] = scaling.get(name)
    return keys


def _rope(rotary_fraction: float | None = None, rope_theta: float = 10000.0) -> Keys:
    names = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )
    read = partial(_read_rope, rope_theta=rope_theta, rotary_fraction=rotary_fraction)
    rule = "`rope_parameters`: the same for all layers"
    if rotary_fraction is None:
        rule += "; `partial_rotary_factor`: 1"
    return Keys(names, read, _write_rope, rule)


def _sizes(init_stddev: float = 0.02) -> tuple[Key, ...]:
    return (
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions"),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_heads"),
        Key("hidden_size", "embed_dim"),
        Key("intermediate_size", "mlp_dim"),
        Key("initializer_range", "init_stddev", init_stddev),
    )


_UNTIED = Key("tie_word_embeddings", "tie_embeddings", False)
_SILU = Only("hidden_act", ("silu", "swish"))
_KEYS = (*_sizes(), _rope(), _UNTIED, _SILU, Key("rms_norm_eps", "rms_norm_epsilon", 1e-6))

_ATTENTION_BIAS = Keys(
    ("attention_bias",),
    lambda hf: {name: bool(hf.get("attention_bias")) for name in ("qkv_bias", "out_bias")},
    lambda fields: {"attention_bias": fields["qkv_bias"]},
)


def _window(default: int | None) -> Keys:
    """Return the key of a sliding window of all layers."""
    return Keys(
        ("sliding_window",),
        lambda hf: {"sliding_window": hf.get("sliding_window", default), "first_windowed_layer": 0},
        lambda fields: {"sliding_window": fields["sliding_window"]},
    )


def _read_qwen_window(hf: Config) -> dict[str, Any]:
    """Read the sliding window, which applies to the last layers only.

    The first layer with a window follows from `max_window_layers`, or from `layer_types` if that
    list is given and differs.
    """
    layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers")
    num_full = min(28 if first is None else first, layers) if window else layers
    types = ["full_attention"] * num_full + ["sliding_attention"] * (layers - num_full)
    layer_types = hf.get("layer_types") or types
    if layer_types != types and window:
        num_full = (
            layer_types.index("sliding_attention") if "sliding_attention" in layer_types else layers
        )
        types = ["full_attention"] * num_full + ["sliding_attention"] * (layers - num_full)
    if layer_types != types:
        raise ValueError(
            f"config.json has layer_types={layer_types} with sliding_window={window}, which is not "
            "supported; all layers with a window must come after all layers without one"
        )
    if num_full == layers:
        return {"sliding_window": None, "first_windowed_layer": 0}
    return {"sliding_window": window, "first_windowed_layer": num_full}


def _write_qwen_window(fields: Config) -> dict[str, Any]:
    if fields["sliding_window"] is None:
        return {"use_sliding_window": False, "sliding_window": None}
    first = fields["first_windowed_layer"]
    return {
        "use_sliding_window": True,
        "sliding_window": fields["sliding_window"],
        "max_window_layers": first,
        "layer_types": ["full_attention"] * first
        + ["sliding_attention"] * (fields["num_layers"] - first),
    }


_QWEN_WINDOW = Keys(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    _read_qwen_window,
    _write_qwen_window,
    "all layers with a sliding window come after all layers without one",
)

_LLAMA = Architecture(
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
        *_KEYS,
        _heads(),
        _ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", False),
        Only("activation", (None, "swiglu")),  # Falcon 3 says what hidden_act=silu also means
    ),
    rows=_rows(_NORMS_BEFORE),
    prefix="model.",
    fields={"head": "lm"},
    is_generative=True,
    harmless=("attention_dropout", "pretraining_tp"),
    buffers=(r"\.rotary_emb\.inv_freq$",),
)
_MISTRAL = dataclasses.replace(
    _LLAMA,
    name="MistralForCausalLM",
    family="Mistral",
    tried=(
        "mistralai/Mistral-7B-v0.1",
        "mistralai/Mistral-7B-v0.3",
        "mistralai/Ministral-8B-Instruct-2410",
    ),
    model_type="mistral",
    keys=(
        *_KEYS,
        _heads(num_kv_heads=8),
        _window(4096),
    ),
)
_QWEN2 = dataclasses.replace(
    _LLAMA,
    name="Qwen2ForCausalLM",
    family="Qwen 2 and 2.5",
    tried=(
        "Qwen/Qwen2.5-7B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    ),
    model_type="qwen2",
    keys=(*_KEYS, _heads(num_kv_heads=32), _QWEN_WINDOW),
    fields={"head": "lm", "qkv_bias": True},
)
_QWEN3 = dataclasses.replace(
    _LLAMA,
    name="Qwen3ForCausalLM",
    family="Qwen 3",
    tried=(
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-8B",
    ),
    model_type="qwen3",
    keys=(*_KEYS, _heads(num_kv_heads=32, head_dim=128), _ATTENTION_BIAS, _QWEN_WINDOW),
    fields={"head": "lm", "qk_norm": True},
)

_OLMO2 = dataclasses.replace(
    _LLAMA,
    name="Olmo2ForCausalLM",
    family="OLMo 2",
    tried=("allenai/OLMo-2-1124-7B",),
    model_type="olmo2",
    keys=(
        *_sizes(),
        _rope(),
        _UNTIED,
        _SILU,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        _heads(),
        _ATTENTION_BIAS,
    ),
    rows=_rows(_NORMS_AFTER),
    fields={"head": "lm", "norms": "after", "qk_norm": True, "qk_norm_over_heads": True},
)
_GRANITE = dataclasses.replace(
    _LLAMA,
    name="GraniteForCausalLM",
    family="Granite 3",
    tried=(
        "ibm-granite/granite-3.1-2b-instruct",
        "ibm-granite/granite-3.3-8b-instruct",
    ),
    model_type="granite",
    keys=(
        *_LLAMA.keys,
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
    _LLAMA,
    name="SeedOssForCausalLM",
    family="Seed-OSS",
    tried=("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    model_type="seed_oss",
    keys=(
        *_KEYS,
        _heads(num_kv_heads=8, head_dim=128),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_out_bias", "out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
    ),
    harmless=(*_LLAMA.harmless, "residual_dropout"),
)

_NEMOTRON = dataclasses.replace(
    _LLAMA,
    name="NemotronForCausalLM",
    family="Nemotron",
    tried=(
        "nvidia/Nemotron-Mini-4B-Instruct",
        "nvidia/Minitron-4B-Base",
    ),
    model_type="nemotron",
    keys=(
        *_sizes(init_stddev=0.0134),
        _rope(rotary_fraction=0.5),
        _heads(),
        _ATTENTION_BIAS,
        _UNTIED,
        Key("norm_eps", "rms_norm_epsilon", 1e-5),
        Key("mlp_bias", "mlp_bias", False),
        Key("hidden_act", "activation", "relu2", ACTIVATIONS),
    ),
    fields={"head": "lm", "norm": "layer_1p", "is_gated": False},
    harmless=(*_LLAMA.harmless, "kv_channels"),  # which is head_dim in NeMo
)
_STABLELM = dataclasses.replace(
    _LLAMA,
    name="StableLmForCausalLM",
    family="StableLM",
    tried=(
        "stabilityai/stablelm-2-1_6b",
        "stabilityai/stablelm-3b-4e1t",
        "stabilityai/stable-code-3b",
    ),
    model_type="stablelm",
    keys=(
        *_sizes(),
        _rope(rotary_fraction=0.25),
        _heads(),
        _UNTIED,
        Key("layer_norm_eps", "rms_norm_epsilon", 1e-5),
        Key("use_qkv_bias", "qkv_bias", False),
        _SILU,
        Only("qk_layernorm", (False,)),
        Key("use_parallel_residual", "norms", False, {False: "before", True: "parallel"}),
    ),
    fields={"head": "lm", "norm": "layer"},
    harmless=("attention_dropout", "hidden_dropout"),
)
#: Norms of queries and keys with a scale for each head, which the files store as [heads, head_dim].
_NORMS_BY_HEAD = tuple(
    Row(f"decoder.layers.attention.{x}_norm.scale", f"{_THEIRS}.self_attn.{x}_norm.weight", "same")
    for x in "qk"
)
_QK_NORM = Keys(
    ("use_qk_norm",),
    lambda hf: {name: bool(hf.get("use_qk_norm")) for name in ("qk_norm", "qk_norm_by_head")},
    lambda fields: {"use_qk_norm": fields["qk_norm"]},
)
_COHERE = dataclasses.replace(
    _LLAMA,
    name="CohereForCausalLM",
    family="Command-R",
    tried=(
        "CohereForAI/c4ai-command-r-v01",
        "CohereForAI/aya-23-8B",
        "CohereForAI/c4ai-command-r-plus",
    ),
    model_type="cohere",
    keys=(
        *_sizes(),
        _rope(rope_theta=500000.0),
        _heads(),
        _ATTENTION_BIAS,
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("layer_norm_eps", "rms_norm_epsilon", 1e-5),
        Key("logit_scale", "logit_scale", 0.0625),
        _SILU,
        _QK_NORM,
    ),
    rows=(*_NORMS_BY_HEAD, *_rows({"attention_norm": "input_layernorm"})),
    fields={
        "head": "lm",
        "norm": "layer_no_bias",
        "norms": "parallel",
        "rotary_pairs": "neighbours",
    },
)

_PHI3 = dataclasses.replace(
    _LLAMA,
    name="Phi3ForCausalLM",
    family="Phi-3 and Phi-4",
    tried=(
        "microsoft/Phi-3-mini-4k-instruct",
        "microsoft/phi-4",
        "microsoft/Phi-4-mini-instruct",
    ),
    model_type="phi3",
    keys=(
        *_sizes(),
        _rope(rotary_fraction=1.0),
        _heads(),
        _UNTIED,
        Key("rms_norm_eps", "rms_norm_epsilon", 1e-5),
        _SILU,
        Only("attention_bias", (False,)),
        _window(None),
    ),
    rows=_rows(_NORMS_BEFORE, ("attention", "mlp")),
    harmless=("attention_dropout", "embd_pdrop", "resid_pdrop"),
)
_GLM4 = dataclasses.replace(
    _LLAMA,
    name="Glm4ForCausalLM",
    family="GLM-4",
    tried=(
        "THUDM/GLM-4-9B-0414",
        "THUDM/GLM-Z1-9B-0414",
    ),
    model_type="glm4",
    keys=(
        *_sizes(),
        _rope(rotary_fraction=0.5),
        _heads(num_kv_heads=2, head_dim=128),
        _UNTIED,
        Key("rms_norm_eps", "rms_norm_epsilon", 0.00000015625),
        Key("attention_bias", "qkv_bias", True),
        _SILU,
    ),
    rows=_rows(
        {
            **_NORMS_BEFORE,
            "attention_norm_2": "post_self_attn_layernorm",
            "mlp_norm_2": "post_mlp_layernorm",
        },
        ("mlp",),
    ),
    fields={"head": "lm", "norms": "around", "rotary_pairs": "neighbours"},
    harmless=("attention_dropout",),
)

_MODELS = (
    _LLAMA,
    _MISTRAL,
    _QWEN2,
    _QWEN3,
    _OLMO2,
    _GRANITE,
    _SEED_OSS,
    _NEMOTRON,
    _STABLELM,
    _COHERE,
    _PHI3,
    _GLM4,
)

ARCHITECTURES = tuple(
    architecture
    for model in _MODELS
    for architecture in (
        model,
        model.base(model.name.replace("ForCausalLM", "Model"), other_heads=(r"lm_head\.",)),
    )
)
