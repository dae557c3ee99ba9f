"""Keys and weight names of T5, T5 version 1.1, and mT5."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.architecture import Architecture
from convert.keys import ACTIVATIONS, Config, Key, Keys, Only
from convert.names import Row
from convert.tensor_files import Tensor, same_values
from models.text.t5 import T5

_HEAD = "lm_head.weight"
_BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"


def _attention(ours: str, theirs: str) -> tuple[Row, ...]:
    qkv = (Row(f"{ours}.{x}.kernel", f"{theirs}.{x}.weight") for x in "qkv")
    return *qkv, Row(f"{ours}.out.kernel", f"{theirs}.o.weight", num_inputs=2)


def _stack(side: str) -> tuple[Row, ...]:
    """Return the rows of the encoder or the decoder, without cross-attention."""
    mlp_number = {"encoder": 1, "decoder": 2}[side]
    ours = f"{side}.layers"
    theirs = f"{side}.block.{{layer}}.layer"
    mlp = f"{theirs}.{mlp_number}.DenseReluDense"
    gate = f"{ours}.mlp.gate.kernel"
    return (
        Row(f"{side}_bias", f"{side}.block.0.{_BIAS}"),
        *_attention(f"{ours}.attention", f"{theirs}.0.SelfAttention"),
        Row(f"{ours}.attention_norm.scale", f"{theirs}.0.layer_norm.weight"),
        Row(f"{ours}.mlp_norm.scale", f"{theirs}.{mlp_number}.layer_norm.weight"),
        Row(f"{ours}.mlp.up.kernel", f"{mlp}.wi.weight", without=gate),
        Row(gate, f"{mlp}.wi_0.weight"),
        Row(f"{ours}.mlp.up.kernel", f"{mlp}.wi_1.weight"),
        Row(f"{ours}.mlp.down.kernel", f"{mlp}.wo.weight"),
        Row(f"{side}_norm.scale", f"{side}.final_layer_norm.weight"),
    )


_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)

_ROWS = (
    Row("token_embedding", "shared.weight", "vocab", tied=_TIED),
    *_stack("encoder"),
    *_stack("decoder"),
    *_attention("decoder.layers.cross_attention", "decoder.block.{layer}.layer.1.EncDecAttention"),
    Row("decoder.layers.cross_norm.scale", "decoder.block.{layer}.layer.1.layer_norm.weight"),
    Row("output_embedding", _HEAD, "vocab"),
)


def _detect_head(tensors: Mapping[str, Tensor], hf: Config) -> dict[str, Any]:
    """Detect whether the head is tied to the token embedding.

    This depends on the weights: transformers sets `tie_word_embeddings` to True for every T5, and
    unties the head if the files contain two different weights.
    """
    table = next((tensors[name] for name in ("shared.weight", *_TIED[:2]) if name in tensors), None)
    if _HEAD not in tensors or table is None:
        return {"tie_embeddings": True}
    is_tied = hf.get("tie_word_embeddings") is not False and same_values(tensors[_HEAD], table)
    return {"tie_embeddings": is_tied}


def _mlp(default: str) -> Keys:
    """Return the keys that determine the kind of MLP.

    Args:
        default: value of `feed_forward_proj` if it is absent.
    """

    def read(hf: Config) -> dict[str, Any]:
        name = hf.get("feed_forward_proj", default)
        gated, _, function = name.rpartition("-")
        # "gated-gelu" has always meant the tanh approximation of GELU.
        function = hf.get("dense_act_fn") or ("gelu_new" if name == "gated-gelu" else function)
        if gated not in ("", "gated") or function not in ACTIVATIONS:
            raise ValueError(
                f"config.json has feed_forward_proj={name!r} with the activation {function!r}, "
                f"which is not supported; the supported values are {', '.join(ACTIVATIONS)}, with "
                "or without 'gated-'"
            )
        is_gated = hf.get("is_gated_act", gated == "gated")
        return {"is_gated": is_gated, "activation": ACTIVATIONS[function]}

    def write(fields: Config) -> dict[str, Any]:
        function = next(a for a, b in ACTIVATIONS.items() if b == fields["activation"])
        if not fields["is_gated"]:
            return {"feed_forward_proj": function}
        names = {"gelu_new": "gelu", "gelu": "gelu_python"}
        return {"feed_forward_proj": f"gated-{names.get(function, function)}"}

    return Keys(("feed_forward_proj", "dense_act_fn", "is_gated_act"), read, write)


def _read_scaling(hf: Config) -> dict[str, Any]:
    implied = hf.get("tie_word_embeddings") is not False
    return {"scale_outputs": hf.get("scale_decoder_outputs", implied)}


def _write_scaling(fields: Config) -> dict[str, Any]:
    scales = fields["scale_outputs"]
    tied = fields["tie_embeddings"]
    return {"scale_decoder_outputs": scales, "tie_word_embeddings": tied}


_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("num_layers", "num_layers"),
    Keys(
        ("num_decoder_layers",),
        lambda hf: {"num_decoder_layers": hf.get("num_decoder_layers") or hf["num_layers"]},
        lambda fields: {"num_decoder_layers": fields["num_decoder_layers"]},
    ),
    Key("num_heads", "num_heads"),
    Key("d_kv", "head_dim"),
    Key("d_model", "embed_dim"),
    Key("d_ff", "mlp_dim"),
    Key("dropout_rate", "dropout", 0.1),
    Key("relative_attention_num_buckets", "num_buckets", 32),
    Key("relative_attention_max_distance", "max_distance", 128),
    Key("layer_norm_epsilon", "rms_norm_epsilon", 1e-6),
    Only("is_decoder", (False,)),
)

_T5 = Architecture(
    name="T5ForConditionalGeneration",
    family="T5 and its version 1.1",
    model_type="t5",
    model="t5",
    model_class=T5,
    keys=(
        *_KEYS,
        _mlp("relu"),
        Keys(("scale_decoder_outputs", "tie_word_embeddings"), _read_scaling, _write_scaling),
    ),
    rows=_ROWS,
    prefix="",
    template="$A {eos}",
    pair_template="$A {eos} $B {eos}",
    is_generative=True,
    harmless=("initializer_factor", "classifier_dropout", "n_positions"),
    # Version 1.0 was published with a bias of cross-attention that the model never uses.
    buffers=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
    detected_fields=("tie_embeddings",),
    detect=_detect_head,
)
_MT5 = dataclasses.replace(
    _T5,
    name="MT5ForConditionalGeneration",
    family="mT5",
    model_type="mt5",
    keys=(
        *_KEYS,
        _mlp("gated-gelu"),
        Keys(
            ("tie_word_embeddings",), lambda hf: {}, lambda fields: {"tie_word_embeddings": False}
        ),
    ),
    fields={"scale_outputs": False},
)

ARCHITECTURES = (_T5, _MT5)
