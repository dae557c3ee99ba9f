"""Keys and weight names of ModernBERT."""

import dataclasses
from typing import Any

from convert.architecture import Architecture
from convert.families.bert import LABEL_KEYS
from convert.keys import ACTIVATIONS, Config, Key, Keys, Only
from convert.names import Row, linear, norm
from models.text.layer_types import layer_pattern
from models.text.modernbert import ModernBert, ModernBertConfig
from untrusted.schema import check

_TYPES = {"full_attention": "full", "sliding_attention": "window"}


def _layers(ours: str) -> tuple[Row, ...]:
    """Return the rows of the layers of a stack.

    Args:
        ours: name of the stack.
    """
    ours = f"{ours}.layers"
    theirs = "model.layers.{layer}"
    return (
        *(
            row
            for part, x in enumerate("qkv")
            for row in linear(f"{ours}.attention.{x}", f"{theirs}.attn.Wqkv", part=part)
        ),
        *linear(f"{ours}.attention.out", f"{theirs}.attn.Wo", num_inputs=2),
        *norm(f"{ours}.attention_norm", f"{theirs}.attn_norm"),
        *norm(f"{ours}.mlp_norm", f"{theirs}.mlp_norm"),
        *linear(f"{ours}.mlp.gate", f"{theirs}.mlp.Wi"),
        *linear(f"{ours}.mlp.up", f"{theirs}.mlp.Wi", part=1),
        *linear(f"{ours}.mlp.down", f"{theirs}.mlp.Wo"),
    )


_ROWS = (
    Row(
        "token_embedding",
        "model.embeddings.tok_embeddings.weight",
        "vocab",
        tied=("decoder.weight",),
    ),
    *norm("embedding_norm", "model.embeddings.norm"),
    *_layers("encoder"),
    *_layers("last_encoder"),
    *norm("final_norm", "model.final_norm"),
    *linear("dense_head.dense", "head.dense"),
    *norm("dense_head.norm", "head.norm"),
    Row("vocab_bias", "decoder.bias", "vocab"),
    *linear("classifier", "classifier"),
)


def _read_layers(hf: Config) -> dict[str, Any]:
    """Read the types of layers, and the sizes of windows, which count tokens on both sides."""
    num_layers = hf["num_hidden_layers"]
    every = hf.get("global_attn_every_n_layers", 3)
    default = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    names = hf.get("layer_types") or default
    check(names, list[str], "config.json: layer_types")
    if len(names) != num_layers or not {*names} <= _TYPES.keys():
        raise ValueError(
            f"config.json has layer_types={names} with num_hidden_layers={num_layers}, which is "
            f"not supported; it must have one of {', '.join(_TYPES)} for each layer"
        )
    window = hf.get("local_attention", 128) // 2 + 1
    has_window = "sliding_attention" in names
    types = layer_pattern([_TYPES[name] for name in names])
    return {"layer_types": types, "sliding_window": window if has_window else None}


def _write_layers(fields: Config) -> dict[str, Any]:
    names = {here: name for name, here in _TYPES.items()}
    types = ModernBertConfig(**fields).types
    keys: dict[str, Any] = {"layer_types": [names.get(each, "full_attention") for each in types]}
    window = fields["sliding_window"]
    return keys if window is None else {**keys, "local_attention": 2 * (window - 1)}


#: Type of a layer -> the key of its base in published files, that base by default, and its field.
_THETAS = {
    "full_attention": ("global_rope_theta", 160000.0, "rope_theta"),
    "sliding_attention": ("local_rope_theta", 10000.0, "window_rope_theta"),
}


def _read_rope(hf: Config) -> dict[str, Any]:
    check(hf.get("rope_parameters"), dict[str, Any] | None, "config.json: rope_parameters")
    by_type = hf.get("rope_parameters") or {}
    fields = {}
    for name, (key, default, field) in _THETAS.items():
        of_type = by_type.get(name) or {}
        if (kind := of_type.get("rope_type", "default")) != "default":
            raise ValueError(
                f"config.json has rope_type={kind!r} for {name}, which is not supported; it must "
                "be 'default'"
            )
        fields[field] = float(of_type.get("rope_theta", hf.get(key, default)))
    return fields


def _write_rope(fields: Config) -> dict[str, Any]:
    thetas = {name: fields[field] for name, (_, _, field) in _THETAS.items()}
    thetas = {name: thetas["full_attention"] if x is None else x for name, x in thetas.items()}
    return {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": theta} for name, theta in thetas.items()
        },
        **{key: thetas[name] for name, (key, _, _) in _THETAS.items()},
    }


_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_heads"),
    Key("hidden_size", "embed_dim"),
    Key("intermediate_size", "mlp_dim"),
    Key("max_position_embeddings", "max_positions"),
    Key("hidden_activation", "activation", "gelu", ACTIVATIONS),
    Key("embedding_dropout", "dropout", 0.0),
    Key("norm_eps", "layer_norm_epsilon", 1e-5),
    Key("norm_bias", "norm_bias", False),
    Key("attention_bias", "attention_bias", False),
    Key("mlp_bias", "mlp_bias", False),
    Key("initializer_range", "init_stddev", 0.02),
    Keys(
        ("layer_types", "global_attn_every_n_layers", "local_attention"),
        _read_layers,
        _write_layers,
        f"`layer_types`: {' or '.join(f'`{name}`' for name in _TYPES)}",
    ),
    Keys(
        ("rope_parameters", *(key for key, _, _ in _THETAS.values())),
        _read_rope,
        _write_rope,
        "`rope_parameters`: `rope_type` default",
    ),
    Only("tie_word_embeddings", (True,)),
)
#: Keys of the dense layer before the logits, which models without a head do not have.
_HEAD_KEYS = (
    Key("classifier_bias", "head_bias", False),
    Key("classifier_activation", "head_activation", "gelu", ACTIVATIONS),
)
_POOL = Key("classifier_pooling", "pool", "cls", {"cls": "class_token", "mean": "mean"})
_VOCAB_BIAS = Key("decoder_bias", "vocab_bias", True)

_HARMLESS = (
    "attention_dropout",
    "classifier_dropout",
    "classifier_pooling",
    "decoder_bias",
    "deterministic_flash_attn",
    "initializer_cutoff_factor",
    "layer_norm_eps",  # in published files, next to norm_eps
    "mlp_dropout",
    "position_embedding_type",
    "problem_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
)

_MASKED_LM = Architecture(
    name="ModernBertForMaskedLM",
    family="ModernBERT",
    tried=("answerdotai/ModernBERT-base",),
    model_type="modernbert",
    model="modernbert",
    model_class=ModernBert,
    keys=(*_KEYS, *_HEAD_KEYS, _VOCAB_BIAS),
    rows=_ROWS,
    prefix="model.",
    fields={"head": "masked_lm"},
    template="{cls} $A {sep}",
    pair_template="{cls} $A {sep} $B {sep}",
    harmless=_HARMLESS,
)


ARCHITECTURES = (
    _MASKED_LM,
    dataclasses.replace(
        _MASKED_LM,
        name="ModernBertForSequenceClassification",
        tried=(),
        keys=(*_KEYS, *_HEAD_KEYS, _POOL, *LABEL_KEYS),
        fields={"head": "sequence"},
        other_heads=(r"decoder\.",),
    ),
    dataclasses.replace(
        _MASKED_LM,
        name="ModernBertForTokenClassification",
        tried=(),
        keys=(*_KEYS, *_HEAD_KEYS, *LABEL_KEYS),
        fields={"head": "token"},
        other_heads=(r"decoder\.",),
    ),
    dataclasses.replace(_MASKED_LM, keys=_KEYS).base(
        "ModernBertModel",
        harmless=(*_HARMLESS, "classifier_activation", "classifier_bias"),
        other_heads=(r"head\.", r"decoder\.", r"classifier\."),
    ),
)
