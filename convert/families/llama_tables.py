"""Keys and weight names that LLaMA and its descendants share."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from convert.keys import ACTIVATIONS, Config, Key, Keys, Only
from convert.names import Row, linear
from convert.names import norm as norm_rows
from models.text.layer_types import layer_pattern
from models.text.llama import LlamaConfig
from untrusted.schema import check

THEIRS = "model.layers.{layer}"


#: Norm of a block -> its name in the files, for norms before the branches and after them.
NORMS_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
NORMS_AFTER = {
    "attention_norm_2": "post_attention_layernorm",
    "mlp_norm_2": "post_feedforward_layernorm",
}


NORMS_AROUND = {
    "attention_norm": "input_layernorm",
    "attention_norm_2": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
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
        Row(f"{ours}.{branch}.{x}.{word}", f"{THEIRS}.{theirs}.{suffix}", part=part)
        for branch in branches
        for theirs, layers in [_FUSED[branch]]
        for part, x in enumerate(layers)
        for word, suffix in (("kernel", "weight"), ("bias", "bias"))
    )


def attention_rows(ours: str) -> tuple[Row, ...]:
    """Return the rows of attention.

    Args:
        ours: path of the attention.
    """
    theirs = f"{THEIRS}.self_attn"
    return (
        *(row for x in "qkv" for row in linear(f"{ours}.{x}", f"{theirs}.{x}_proj")),
        Row(f"{ours}.q_norm.scale", f"{theirs}.q_norm.weight"),
        Row(f"{ours}.k_norm.scale", f"{theirs}.k_norm.weight"),
        *linear(f"{ours}.out", f"{theirs}.o_proj", num_inputs=2),
    )


def latent_attention_rows(ours: str) -> tuple[Row, ...]:
    """Return the rows of latent attention.

    Args:
        ours: path of the attention.
    """
    theirs = f"{THEIRS}.self_attn"
    return (
        *linear(f"{ours}.q_down", f"{theirs}.q_a_proj"),
        Row(f"{ours}.q_norm.scale", f"{theirs}.q_a_layernorm.weight"),
        Row(f"{ours}.q.kernel", f"{theirs}.q_proj.weight", without=f"{ours}.q_down.kernel"),
        Row(f"{ours}.q.kernel", f"{theirs}.q_b_proj.weight"),
        *linear(f"{ours}.kv_down", f"{theirs}.kv_a_proj_with_mqa"),
        Row(f"{ours}.kv_norm.scale", f"{theirs}.kv_a_layernorm.weight"),
        Row(f"{ours}.kv_up.kernel", f"{theirs}.kv_b_proj.weight"),
        *linear(f"{ours}.out", f"{theirs}.o_proj", num_inputs=2),
    )


#: Function from the path of a module to its rows.
ModuleRows = Callable[[str], tuple[Row, ...]]


def expert_rows(
    block: str = "mlp", projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> ModuleRows:
    """Return a function to the rows of a router, its experts and their shared MLP.

    Args:
        block: name of the module in the files.
        projections: names of the gate, up and down projections of an expert.
    """
    theirs = f"{THEIRS}.{block}"

    def rows(ours: str) -> tuple[Row, ...]:
        return (
            Row(f"{ours}.router", f"{theirs}.gate.weight", "linear"),
            Row(f"{ours}.balance", f"{theirs}.gate.e_score_correction_bias"),
            *(
                Row(f"{ours}.{x}", f"{theirs}.experts.{{expert}}.{name}.weight", "linear")
                for x, name in zip(("gate", "up", "down"), projections, strict=True)
            ),
            *(
                Row(
                    f"{ours}.shared.{x}.kernel",
                    f"{theirs}.{shared}.{x}_proj.weight",
                    without=without,
                )
                for shared, without in (
                    ("shared_experts", f"{ours}.shared_gate.kernel"),
                    ("shared_expert", None),
                )
                for x in ("gate", "up", "down")
            ),
            Row(f"{ours}.shared_gate.kernel", f"{theirs}.shared_expert_gate.weight"),
        )

    return rows


def _block_rows(
    ours: str,
    norms: Mapping[str, str],
    fused: Sequence[str],
    attention_rows: ModuleRows,
    mlp_rows: ModuleRows | None,
) -> tuple[Row, ...]:
    return (
        *_fused_rows(ours, *fused),  # instead of the rows of the same parameters below
        *(
            Row(f"{ours}.{norm}.{word}", f"{THEIRS}.{theirs}.{suffix}")
            for norm, theirs in norms.items()
            for word, suffix in (("scale", "weight"), ("bias", "bias"))
            if word == "scale" or not norm.endswith("_2")  # these are RMS norms in all families
        ),
        *attention_rows(f"{ours}.attention"),
        *(
            row
            for x in ("gate", "up", "down")
            for row in linear(f"{ours}.mlp.{x}", f"{THEIRS}.mlp.{x}_proj")
        ),
        *(() if mlp_rows is None else mlp_rows(f"{ours}.mlp")),
    )


def rows_of(
    norms: Mapping[str, str],
    fused: Sequence[str] = (),
    attention_rows: ModuleRows = attention_rows,
    mlp_rows: ModuleRows | None = None,
) -> tuple[Row, ...]:
    """Return the rows of a model.

    Args:
        norms: norm of a block -> its name in the files.
        fused: keys of _FUSED.
        attention_rows: path of an attention -> its rows.
        mlp_rows: path of an MLP -> the rows of its experts; None for a model without any.
    """
    blocks = (norms, fused, attention_rows, mlp_rows)
    return (
        Row("token_embedding", "model.embed_tokens.weight", "vocab", tied=("lm_head.weight",)),
        *_block_rows("decoder.layers", *blocks),
        *_block_rows("last_decoder.layers", *blocks),
        *norm_rows("final_norm", "model.norm"),
        Row("output_embedding", "lm_head.weight", "vocab"),
    )


#: Norm of a block that predicts tokens after the next -> its name in the files.
_NORMS_AHEAD = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "output_norm": "shared_head.norm",
}


def rows_ahead(*blocks: Any) -> tuple[Row, ...]:
    """Return the rows of the layers after the last one, which predict tokens after the next.

    Args:
        *blocks: arguments of `rows_of`, all of them.
    """
    copied: dict[str, Any] = {"kind": "vocab", "copied_in": "mtp"}
    return (
        *_block_rows("mtp.layers", *blocks),
        *(
            Row(f"mtp.layers.{ours}.scale", f"{THEIRS}.{theirs}.weight")
            for ours, theirs in _NORMS_AHEAD.items()
        ),
        Row("mtp.layers.joint.kernel", f"{THEIRS}.eh_proj.weight", num_inputs=2),
        Row("token_embedding", f"{THEIRS}.embed_tokens.weight", **copied),
        Row("output_embedding", f"{THEIRS}.shared_head.head.weight", **copied),
    )


def heads(*, num_kv_heads: int | None = None, head_dim: int | None = None) -> Keys:
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
            f"config.json has rope_parameters={scaling}, which must be the same for all layers of "
            "this architecture"
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


_ROPE_NAMES = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def rope(rotary_fraction: float | None = None, rope_theta: float = 10000.0) -> Keys:
    """Return the keys about rotary positions; arguments as for `_read_rope`."""
    read = partial(_read_rope, rope_theta=rope_theta, rotary_fraction=rotary_fraction)
    rule = "`rope_parameters`: the same for all layers"
    if rotary_fraction is None:
        rule += "; `partial_rotary_factor`: 1"
    return Keys(_ROPE_NAMES, read, _write_rope, rule)


def rope_by_type(rope_theta: float, window_theta: float | None, window_key: str) -> Keys:
    """Return the keys about rotary positions that layers with a sliding window may have others of.

    Args:
        rope_theta: base of the wavelengths if the key is absent.
        window_theta: base in layers with a window if the key is absent; None: as in other layers.
        window_key: key of that base, in files without `rope_parameters`.
    """

    def read(hf: Config) -> dict[str, Any]:
        check(hf.get("rope_parameters"), dict[str, Any] | None, "config.json: rope_parameters")
        by_type = hf.get("rope_parameters") or {}
        flat = {**hf, "rope_parameters": by_type.get("full_attention")}
        fields = _read_rope(flat, rope_theta=rope_theta, rotary_fraction=None)
        of_window = by_type.get("sliding_attention") or {}
        if (kind := of_window.get("rope_type", "default")) != "default":
            raise ValueError(
                f"config.json has rope_type={kind!r} for sliding_attention, which is not "
                "supported; it must be 'default'"
            )
        thetas = of_window.get("rope_theta"), hf.get(window_key), window_theta
        theta = _first(*thetas, fields["rope_theta"])
        return {**fields, "window_rope_theta": float(theta)}

    def write(fields: Config) -> dict[str, Any]:
        of_all = _write_rope(fields)
        theta, scaling = of_all["rope_theta"], of_all["rope_scaling"]
        of_window = fields["window_rope_theta"] or theta
        return {
            "rope_theta": theta,
            "rope_scaling": scaling,
            window_key: of_window,
            "rope_parameters": {
                "full_attention": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
                "sliding_attention": {"rope_theta": of_window, "rope_type": "default"},
            },
        }

    rule = "`rope_parameters`: `rope_type` default for `sliding_attention`"
    return Keys((*_ROPE_NAMES, window_key), read, write, rule)


def sizes(init_stddev: float = 0.02) -> tuple[Key, ...]:
    """Return the keys of sizes, which all have in common."""
    return (
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions"),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_heads"),
        Key("hidden_size", "embed_dim"),
        Key("intermediate_size", "mlp_dim"),
        Key("initializer_range", "init_stddev", init_stddev),
    )


UNTIED = Key("tie_word_embeddings", "tie_embeddings", False)
SILU = Only("hidden_act", ("silu", "swish"))
KEYS = (*sizes(), rope(), UNTIED, SILU, Key("rms_norm_eps", "rms_norm_epsilon", 1e-6))


def attention_bias(default: bool) -> Keys:
    """Return the key of biases of all projections of attention.

    Args:
        default: whether there are biases if the key is absent.
    """
    return Keys(
        ("attention_bias",),
        lambda hf: dict.fromkeys(("qkv_bias", "out_bias"), bool(hf.get("attention_bias", default))),
        lambda fields: {"attention_bias": fields["qkv_bias"]},
    )


ATTENTION_BIAS = attention_bias(False)


def _read_latents(hf: Config) -> dict[str, Any]:
    """Read the sizes of latent attention, and the scale of its scores, which depends on yarn."""
    heads = hf["num_attention_heads"]
    head_dim = hf.get("qk_nope_head_dim", 128)
    rotary_dim = hf.get("qk_rope_head_dim", 64)
    scaling = _read_rope(hf, rope_theta=10000.0, rotary_fraction=None)["rope_scaling"] or {}
    factor = scaling.get("factor", 1.0)
    of_all = scaling.get("mscale_all_dim") or 0.0
    stretch = 0.1 * of_all * math.log(factor) + 1.0 if factor > 1 else 1.0
    scale = (head_dim + rotary_dim) ** -0.5 * stretch**2
    return {
        "latent_dim": hf.get("kv_lora_rank", 512),
        "query_latent_dim": hf.get("q_lora_rank", 1536),
        "head_dim": head_dim,
        "latent_rotary_dim": rotary_dim,
        "value_dim": hf.get("v_head_dim", 128),
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "attention_scale": None if stretch == 1.0 else scale,
    }


def _write_latents(fields: Config) -> dict[str, Any]:
    return {
        "kv_lora_rank": fields["latent_dim"],
        "q_lora_rank": fields["query_latent_dim"],
        "qk_nope_head_dim": fields["head_dim"],
        "qk_rope_head_dim": fields["latent_rotary_dim"],
        "v_head_dim": fields["value_dim"],
        "num_key_value_heads": fields["num_kv_heads"],
    }


LATENTS = Keys(
    (
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_key_value_heads",
    ),
    _read_latents,
    _write_latents,
)


def _read_query_scale(hf: Config) -> dict[str, Any]:
    """Read the number whose root divides the scores; by default the size of a head."""
    squared = hf.get("query_pre_attn_scalar", 256)
    is_default = squared == hf.get("head_dim", 256)
    return {"attention_scale": None if is_default else squared**-0.5}


def _write_query_scale(fields: Config) -> dict[str, Any]:
    scale = fields["attention_scale"]
    return {"query_pre_attn_scalar": round(fields["head_dim"] if scale is None else scale**-2)}


_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}

#: Keys of Gemma 2 and 3.
GEMMA_KEYS = (
    heads(num_kv_heads=4, head_dim=256),
    ATTENTION_BIAS,
    Key("tie_word_embeddings", "tie_embeddings", True),
    Key("rms_norm_eps", "rms_norm_epsilon", 1e-6),
    Key("hidden_activation", "activation", "gelu_pytorch_tanh", _GEMMA_ACTIVATIONS),
    Keys(("query_pre_attn_scalar",), _read_query_scale, _write_query_scale),
    Keys((), lambda hf: {"embedding_scale": hf["hidden_size"] ** 0.5}, lambda fields: {}),
    Only("use_bidirectional_attention", (False,)),
)


def window(default: int | None) -> Keys:
    """Return the key of a sliding window of all layers."""
    return Keys(
        ("sliding_window",),
        lambda hf: {"sliding_window": hf.get("sliding_window", default), "layer_types": ()},
        lambda fields: {"sliding_window": fields["sliding_window"]},
    )


def windows(
    default_types: Callable[[Config], list[str]],
    *,
    default: int | None,
    full: str = "full",
    further_names: Sequence[str] = (),
) -> Keys:
    """Return the keys of a sliding window that some of the layers have.

    Args:
        default_types: config.json -> types of the layers if it has no `layer_types`.
        default: window if the key is absent.
        full: type here of layers without a window.
        further_names: keys that `default_types` reads.
    """
    types_here = {"sliding_attention": "window", "full_attention": full}

    def read(hf: Config) -> dict[str, Any]:
        size = hf.get("sliding_window", default)
        num_layers = hf["num_hidden_layers"]
        names = hf.get("layer_types") or default_types(hf)
        check(names, list[str], "config.json: layer_types")
        unknown = [name for name in names if name not in types_here]
        if unknown or len(names) != num_layers:
            raise ValueError(
                f"config.json has layer_types={names} with num_hidden_layers={num_layers}, which "
                f"is not supported; it must have one of {', '.join(types_here)} for each layer"
            )
        if size is None and "sliding_attention" in names:
            raise ValueError(
                f"config.json has sliding_window=None with layer_types={names}, which is not "
                "supported; give sliding_attention a window"
            )
        types = layer_pattern([types_here[name] for name in names])
        has_window = "sliding_attention" in names
        return {"layer_types": types, "sliding_window": size if has_window else None}

    def write(fields: Config) -> dict[str, Any]:
        names = {here: name for name, here in types_here.items()}
        types = LlamaConfig(**fields).types
        return {
            # Without such layers, too: transformers computes their mask for every model.
            "sliding_window": fields["sliding_window"] or default,
            "layer_types": [names.get(each, "full_attention") for each in types],
        }

    names = ("sliding_window", "layer_types", *further_names)
    return Keys(names, read, write, f"`layer_types`: {' or '.join(f'`{t}`' for t in types_here)}")


def full_every(interval: int, *names: str) -> Callable[[Config], list[str]]:
    """Return a function to the types of layers of which the last of each interval has no window.

    Args:
        interval: number of layers of the pattern, unless a key gives it.
        *names: keys that may give it.
    """

    def types(hf: Config) -> list[str]:
        every = next((hf[name] for name in names if hf.get(name)), interval)
        return [
            "sliding_attention" if number % every else "full_attention"
            for number in range(1, hf["num_hidden_layers"] + 1)
        ]

    return types


def _qwen_types(hf: Config) -> list[str]:
    """Return the types of layers of which the first ones have no window."""
    num_layers = hf["num_hidden_layers"]
    first = hf.get("max_window_layers")
    num_full = min(28 if first is None else first, num_layers)
    return ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)


def _qwen_window() -> Keys:
    names = ("use_sliding_window", "max_window_layers")
    keys = windows(_qwen_types, default=4096, further_names=names)

    def read(hf: Config) -> dict[str, Any]:
        if hf.get("use_sliding_window"):
            return keys.read(hf)
        if "sliding_attention" in (hf.get("layer_types") or ()):
            raise ValueError(
                f"config.json has layer_types={hf['layer_types']} without use_sliding_window, "
                "which is not supported; set use_sliding_window to true, or leave layer_types out"
            )
        return {"sliding_window": None, "layer_types": ()}

    def write(fields: Config) -> dict[str, Any]:
        if fields["sliding_window"] is None:
            return {"use_sliding_window": False, "sliding_window": None}
        written = keys.write(fields)
        num_full = written["layer_types"].index("sliding_attention")
        return {"use_sliding_window": True, "max_window_layers": num_full, **written}

    return Keys(keys.names, read, write, keys.rule)


QWEN_WINDOW = _qwen_window()


def _without_positions() -> Keys:
    """Return the keys of layers without rotary positions."""

    def read(hf: Config) -> dict[str, Any]:
        num_layers = hf["num_hidden_layers"]
        every = hf.get("no_rope_layer_interval", 4)
        default = [int(number % every != 0) for number in range(1, num_layers + 1)]
        has_positions = hf.get("no_rope_layers") or default  # 1 for a layer that has them
        kinds = {"full_attention", *(hf.get("layer_types") or ())}
        if len(has_positions) != num_layers or len(kinds) > 1:
            raise ValueError(
                f"config.json has no_rope_layers={has_positions} and layer types "
                f"{', '.join(sorted(kinds))} with num_hidden_layers={num_layers}, which is not "
                "supported; no_rope_layers must have an entry per layer, and all types must be "
                "full_attention"
            )
        types = layer_pattern(["full" if each else "no_positions" for each in has_positions])
        return {"layer_types": types, "sliding_window": None}

    def write(fields: Config) -> dict[str, Any]:
        types = LlamaConfig(**fields).types
        return {"no_rope_layers": [int(each != "no_positions") for each in types]}

    names = ("no_rope_layers", "no_rope_layer_interval", "layer_types")
    return Keys(names, read, write, "`layer_types`: only `full_attention`")


WITHOUT_POSITIONS = _without_positions()
