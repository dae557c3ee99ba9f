"""Keys and weight names of T5, T5 version 1.1, mT5, and Switch Transformers."""

import dataclasses
from collections.abc import Iterator, Mapping
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


def _blocks(side: str, stack: str, mlp: str) -> tuple[Row, ...]:
    """Return the rows of a stack of the encoder or the decoder; arguments as for `_rows`."""
    mlp_number = {"encoder": 1, "decoder": 2}[side]
    ours = f"{stack}.layers"
    theirs = f"{side}.block.{{layer}}.layer"
    dense = f"{theirs}.{mlp_number}.{mlp}"
    gate = f"{ours}.mlp.gate.kernel"
    router = f"{dense}.router.classifier"
    expert = f"{dense}.experts.expert_{{expert}}"
    return (
        *_attention(f"{ours}.attention", f"{theirs}.0.SelfAttention"),
        Row(f"{ours}.attention_norm.scale", f"{theirs}.0.layer_norm.weight"),
        Row(f"{ours}.mlp_norm.scale", f"{theirs}.{mlp_number}.layer_norm.weight"),
        Row(f"{ours}.mlp.up.kernel", f"{dense}.wi.weight", without=gate),
        Row(gate, f"{dense}.wi_0.weight"),
        Row(f"{ours}.mlp.up.kernel", f"{dense}.wi_1.weight"),
        Row(f"{ours}.mlp.down.kernel", f"{dense}.wo.weight"),
        Row(f"{ours}.mlp.router", f"{router}.weight", "linear"),
        Row(f"{ours}.mlp.router_bias", f"{router}.bias"),
        Row(f"{ours}.mlp.up", f"{expert}.wi.weight", "linear"),
        Row(f"{ours}.mlp.down", f"{expert}.wo.weight", "linear"),
    )


def _cross_attention(stack: str) -> tuple[Row, ...]:
    theirs = "decoder.block.{layer}.layer.1"
    return (
        *_attention(f"{stack}.layers.cross_attention", f"{theirs}.EncDecAttention"),
        Row(f"{stack}.layers.cross_norm.scale", f"{theirs}.layer_norm.weight"),
    )


def _side(side: str, mlp: str) -> tuple[Row, ...]:
    """Return the rows of the encoder or the decoder; arguments as for `_rows`."""
    return (
        Row(f"{side}_bias", f"{side}.block.0.{_BIAS}"),
        *_blocks(side, side, mlp),
        *_blocks(side, f"last_{side}", mlp),
        Row(f"{side}_norm.scale", f"{side}.final_layer_norm.weight"),
    )


_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)


def _rows(mlp: str) -> tuple[Row, ...]:
    """Return the rows of a model.

    Args:
        mlp: name of the MLPs in the files.
    """
    return (
        Row("token_embedding", "shared.weight", "vocab", tied=_TIED),
        *_side("encoder", mlp),
        *_side("decoder", mlp),
        *_cross_attention("decoder"),
        *_cross_attention("last_decoder"),
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
    rows=_rows("DenseReluDense"),
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


def _sparse_step(ours: str, num_layers: str, side: str, default_layers: int) -> Keys:
    """Return the keys of the layers that have experts, of the encoder or the decoder.

    Args:
        ours: field of the step.
        num_layers: key of the number of layers.
        side: side of the keys.
        default_layers: number of layers with experts if the keys are absent.
    """
    step_key = f"{side}_sparse_step"
    count_key = f"num_sparse_{side}_layers"

    def read(hf: Config) -> dict[str, Any]:
        if hf.get(step_key) is not None:
            return {ours: hf[step_key]}
        layers = hf.get(num_layers) or hf["num_layers"]
        count = hf.get(count_key, default_layers)
        # transformers means to have no experts then, but has some in the second layer.
        return {ours: layers // count if count > 0 else layers}

    def write(fields: Config) -> dict[str, Any]:
        step = fields[ours]
        return {step_key: step, count_key: fields[num_layers] // step if step else 0}

    return Keys((step_key, count_key), read, write)


def _switch_limits(config: Any) -> Iterator[str]:
    if not config.scale_outputs:
        # transformers would read three tables, for the encoder, the decoder and the head.
        yield "model.scale_outputs=False"


_SWITCH = dataclasses.replace(
    _T5,
    name="SwitchTransformersForConditionalGeneration",
    family="Switch Transformers",
    model_type="switch_transformers",
    keys=(
        *_KEYS,
        Key("dense_act_fn", "activation", "relu", ACTIVATIONS),
        Only("is_gated_act", (False,)),
        # This decides about the scale; whether the head is tied depends on the weights.
        Key("tie_word_embeddings", "scale_outputs", True),
        _sparse_step("sparse_step", "num_layers", "encoder", 3),
        _sparse_step("decoder_sparse_step", "num_decoder_layers", "decoder", 3),
        Key("num_experts", "num_experts", 8),
        Key("expert_capacity", "expert_capacity_tokens", 64),
        Key("router_bias", "router_bias", False),
        Only("router_dtype", ("float32",)),
        Only("router_ignore_padding_tokens", (False,)),
        Only("router_type", ("tokens_masked",)),
    ),
    rows=_rows("mlp"),
    limits=_switch_limits,
    fields={"is_gated": False, "experts_per_token": 1, "router_normalizes": False},
    harmless=(
        *_T5.harmless,
        "add_router_probs",
        "feed_forward_proj",
        "num_partitions",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "router_z_loss_coef",
    ),
)

ARCHITECTURES = (_T5, _MT5, _SWITCH)
