"""Keys and weight names of ViT, some of which MAE and Swin share."""

import dataclasses

from convert.architecture import Architecture, detect_pooler
from convert.keys import ACTIVATIONS, NUM_LABELS, Config, Key, Keys, Only
from convert.names import Row, linear, norm
from models.vision.vit import ViT

#: Linear layer of a block here -> its name in the Hugging Face model.
_LINEARS = {
    "attention.q": "attention.attention.query",
    "attention.k": "attention.attention.key",
    "attention.v": "attention.attention.value",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
NORMS = {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
#: Layer names in files -> module names in transformers 5; for ViT and Swin.
LAYER_MODULES = (
    (r"\battention\.(?:attention|self)\.query\b", "attention.q_proj"),
    (r"\battention\.(?:attention|self)\.key\b", "attention.k_proj"),
    (r"\battention\.(?:attention|self)\.value\b", "attention.v_proj"),
    (r"\battention\.output\.dense\b", "attention.o_proj"),
    (r"\bintermediate\.dense\b", "mlp.fc1"),
    (r"\boutput\.dense\b", "mlp.fc2"),
)
MODULES = ((r"\bencoder\.layer\.", "layers."), *LAYER_MODULES)


def patches(ours: str, theirs: str) -> tuple[Row, Row]:
    """Return the rows of a patch embedding, which is a convolution in the Hugging Face model.

    Args:
        ours: path of the layer.
        theirs: name of the module that contains `patch_embeddings`.
    """
    projection = f"{theirs}.patch_embeddings.projection"
    kernel = Row(f"{ours}.linear.kernel", f"{projection}.weight", "conv2d", num_inputs=3)
    return kernel, Row(f"{ours}.linear.bias", f"{projection}.bias")


def blocks(ours: str, theirs: str) -> tuple[Row, ...]:
    """Return the rows of a stack of ViT blocks.

    Args:
        ours: path of the stack.
        theirs: name of a block, with `{layer}` in place of its number.
    """
    return (
        *(r for a, b in _LINEARS.items() for r in linear(f"{ours}.layers.{a}", f"{theirs}.{b}")),
        *linear(f"{ours}.layers.attention.out", f"{theirs}.attention.output.dense", num_inputs=2),
        *(r for a, b in NORMS.items() for r in norm(f"{ours}.layers.{a}", f"{theirs}.{b}")),
    )


def body(base: str) -> tuple[Row, ...]:
    """Return the rows of the base model; `base` is the prefix of the names, without its dot."""
    return (
        *patches("patch_embedding", f"{base}.embeddings"),
        Row("class_token", f"{base}.embeddings.cls_token"),
        Row("position_embedding", f"{base}.embeddings.position_embeddings"),
        *blocks("encoder", f"{base}.encoder.layer.{{layer}}"),
        *norm("final_norm", f"{base}.layernorm"),
    )


BODY = body("vit")


def side(key: str, default: int) -> Keys:
    """Return a key whose value is a number or a list of two equal numbers.

    Args:
        key: name of both the key and the field.
        default: value if the key is absent.
    """

    def read(hf: Config) -> dict[str, int]:
        value = hf.get(key)
        sides = value if isinstance(value, list) else [default if value is None else value]
        if any(a != sides[0] for a in sides) or len(sides) not in (1, 2):
            raise ValueError(
                f"config.json has {key}={value!r}, which is not supported; it must be square"
            )
        return {key: sides[0]}

    return Keys((key,), read, lambda fields: {key: fields[key]})


#: Keys that all vision models share.
IMAGE_KEYS = (
    side("image_size", 224),
    Key("num_channels", "num_channels", 3),
    Key("qkv_bias", "qkv_bias", True),
    Key("hidden_act", "activation", "gelu", ACTIVATIONS),
    Key("hidden_dropout_prob", "dropout", 0.0),
    Key("initializer_range", "init_stddev", 0.02),
)
KEYS = (
    *IMAGE_KEYS,
    side("patch_size", 16),
    Key("num_hidden_layers", "num_layers", 12),
    Key("num_attention_heads", "num_heads", 12),
    Key("hidden_size", "embed_dim", 768),
    Key("intermediate_size", "mlp_dim", 3072),
    Key("layer_norm_eps", "layer_norm_epsilon", 1e-12),
)
HARMLESS = ("attention_probs_dropout_prob", "encoder_stride", "problem_type")


_VIT = Architecture(
    name="ViTForImageClassification",
    family="ViT",
    model_type="vit",
    model="vit",
    model_class=ViT,
    keys=(*KEYS, NUM_LABELS),
    rows=(*BODY, *linear("classifier", "classifier")),
    prefix="vit.",
    harmless=(*HARMLESS, "pooler_act", "pooler_output_size"),
    other_heads=(r"(vit\.)?pooler\.", r"(vit\.)?embeddings\.mask_token", r"decoder\."),
    module_names=MODULES,
)
ARCHITECTURES = (
    _VIT,
    dataclasses.replace(
        _VIT,
        keys=(*KEYS, Only("pooler_act", ("tanh",))),
        rows=(*BODY, *linear("pooler", "vit.pooler.dense")),
    ).base(
        "ViTModel",
        detect=detect_pooler,
        detected_fields=("use_pooler",),
        harmless=(*HARMLESS, "pooler_output_size"),
        other_heads=(r"classifier\.", r"(vit\.)?embeddings\.mask_token", r"decoder\."),
    ),
)
