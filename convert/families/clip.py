"""Keys and weight names of CLIP and SigLIP."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.architecture import Architecture
from convert.keys import ACTIVATIONS, Config, Key, KeyMap, Keys, Only
from convert.names import Row, linear, norm
from models.text.opt import OPT
from models.vision.clip import Clip
from models.vision.vit import ViT

#: Our prefix of a side's fields -> section of config.json.
_SECTIONS = {"": "vision_config", "text_": "text_config"}
#: `eos_token_id` of CLIPs whose texts end with the largest id, whatever config.json says.
_HIGHEST_ID = 2


def _blocks(ours: str, theirs: str) -> tuple[Row, ...]:
    """Return the rows of a stack."""
    blocks = f"{theirs}.encoder.layers.{{layer}}"
    return (
        *(r for x in "qkv" for r in _linear(f"{ours}.layers.attention.{x}", blocks, f"{x}_proj")),
        *linear(f"{ours}.layers.attention.out", f"{blocks}.self_attn.out_proj", num_inputs=2),
        *norm(f"{ours}.layers.attention_norm", f"{blocks}.layer_norm1"),
        *norm(f"{ours}.layers.mlp_norm", f"{blocks}.layer_norm2"),
        *linear(f"{ours}.layers.mlp.up", f"{blocks}.mlp.fc1"),
        *linear(f"{ours}.layers.mlp.down", f"{blocks}.mlp.fc2"),
    )


def _linear(ours: str, block: str, name: str) -> tuple[Row, Row]:
    return linear(ours, f"{block}.self_attn.{name}")


def _attention_pool(ours: str, theirs: str) -> tuple[Row, ...]:
    """Return the rows of SigLIP's head of images, which stores [q; k; v] as one matrix."""
    attention = f"{theirs}.attention"
    parts = (
        row
        for part, x in enumerate("qkv")
        for row in (
            Row(f"{ours}.attention.{x}.kernel", f"{attention}.in_proj_weight", part=part),
            Row(f"{ours}.attention.{x}.bias", f"{attention}.in_proj_bias", part=part),
        )
    )
    return (
        Row(f"{ours}.probe", f"{theirs}.probe"),
        *parts,
        *linear(f"{ours}.attention.out", f"{attention}.out_proj", num_inputs=2),
        *norm(f"{ours}.norm", f"{theirs}.layernorm"),
        *linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc1"),
        *linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc2"),
    )


_PATCHES = "vision_model.embeddings.patch_embedding"
_BODY = (
    Row("patch_embedding.linear.kernel", f"{_PATCHES}.weight", "conv2d", num_inputs=3),
    Row("patch_embedding.linear.bias", f"{_PATCHES}.bias"),
    Row("position_embedding", "vision_model.embeddings.position_embedding.weight"),
    *_blocks("image_encoder", "vision_model"),
    *norm("final_norm", "vision_model.post_layernorm"),
    Row("token_embedding", "text_model.embeddings.token_embedding.weight", "vocab"),
    Row("text_position_embedding", "text_model.embeddings.position_embedding.weight"),
    *_blocks("text_encoder", "text_model"),
    *norm("text_final_norm", "text_model.final_layer_norm"),
)


def _both(theirs: str, ours: str, default: Any, values: Mapping | None = None) -> Keys:
    """Return a key that both sections have, with the same value."""
    keys = [Key(f"{section}.{theirs}", ours, default, values) for section in _SECTIONS.values()]

    def read(hf: Config) -> dict[str, Any]:
        images, text = (key.read(hf) for key in keys)
        if images != text:
            raise ValueError(
                f"config.json has {keys[0].theirs}={hf.get(keys[0].theirs)!r} and "
                f"{keys[1].theirs}={hf.get(keys[1].theirs)!r}, but they must be equal"
            )
        return images

    def write(fields: Config) -> dict[str, Any]:
        return {name: value for key in keys for name, value in key.write(fields).items()}

    return Keys(tuple(key.theirs for key in keys), read, write)


def _read_older(hf: Config) -> dict[str, Any]:
    """Check the keys of a file's `text_config_dict` and `vision_config_dict`: copies of sections.

    Raises:
        ValueError: A key has another value than in the section, which transformers would ignore.
    """
    for section in _SECTIONS.values():
        for name, value in (hf.get(f"{section}_dict") or {}).items():
            known = hf.get(f"{section}.{name}", value)
            if known != value:
                raise ValueError(
                    f"config.json has {name}={value!r} in {section}_dict but {known!r} in "
                    f"{section}, which must be equal; remove {section}_dict if {section} is right"
                )
    return {}


def _keys(defaults: Mapping[str, Any]) -> KeyMap:
    """Return the keys that CLIP and SigLIP share.

    Args:
        defaults: name of a key, or `text_config.` and its name -> value if it is absent.
    """

    def sizes(prefix: str) -> list[Key]:
        section = _SECTIONS[prefix]
        names = {
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "hidden_size": "embed_dim",
            "intermediate_size": "mlp_dim",
        }
        return [
            Key(
                f"{section}.{theirs}",
                f"{prefix}{ours}",
                defaults.get(f"{section}.{theirs}", defaults[theirs]),
            )
            for theirs, ours in names.items()
        ]

    older = tuple(f"{section}_dict" for section in _SECTIONS.values())
    return (
        *sizes(""),
        *sizes("text_"),
        Key("vision_config.image_size", "image_size", 224),
        Key("vision_config.patch_size", "patch_size", defaults["patch_size"]),
        Key("vision_config.num_channels", "num_channels", 3),
        Key("text_config.vocab_size", "vocab_size", defaults["vocab_size"]),
        Key("text_config.max_position_embeddings", "max_positions", defaults["positions"]),
        _both("hidden_act", "activation", defaults["hidden_act"], ACTIVATIONS),
        _both("layer_norm_eps", "layer_norm_epsilon", defaults["layer_norm_eps"]),
        *(Only(f"{section}.attention_dropout", (0.0,)) for section in _SECTIONS.values()),
        Keys(older, _read_older, lambda fields: {}),
    )


def _read_end(hf: Config) -> dict[str, Any]:
    eos_id = hf.get("text_config.eos_token_id", 49407)
    if eos_id == _HIGHEST_ID:
        return {"text_pool": "highest_id", "eos_id": None}
    return {"text_pool": "eos", "eos_id": eos_id}


def _write_end(fields: Config) -> dict[str, Any]:
    is_highest = fields["text_pool"] == "highest_id"
    return {"text_config.eos_token_id": _HIGHEST_ID if is_highest else fields["eos_id"]}


_SIZES = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
_HARMLESS = ("initializer_factor",) + tuple(
    f"{section}.{name}"
    for section in _SECTIONS.values()
    for name in ("initializer_factor", "initializer_range", "projection_dim")
)
_CLIP = Architecture(
    name="CLIPModel",
    family="CLIP",
    tried=("openai/clip-vit-base-patch32",),
    model_type="clip",
    model="clip",
    model_class=Clip,
    keys=(
        *_keys(
            _SIZES
            | {
                "intermediate_size": 3072,
                "text_config.num_attention_heads": 8,
                "text_config.hidden_size": 512,
                "text_config.intermediate_size": 2048,
                "patch_size": 32,
                "vocab_size": 49408,
                "positions": 77,
                "hidden_act": "quick_gelu",
                "layer_norm_eps": 1e-5,
            }
        ),
        Key("projection_dim", "projection_dim", 512),
        Key("logit_scale_init_value", "initial_logit_scale", 2.6592),
        Keys(("text_config.eos_token_id",), _read_end, _write_end),
    ),
    rows=(
        *_BODY,
        Row("class_token", "vision_model.embeddings.class_embedding", "flat"),
        *norm("first_norm", "vision_model.pre_layrnorm"),
        Row("projection.kernel", "visual_projection.weight"),
        Row("text_projection.kernel", "text_projection.weight"),
        Row("logit_scale", "logit_scale", "scalar"),
    ),
    prefix="",
    fields={"pool": "class_token", "contrast": "softmax"},
    harmless=_HARMLESS,
    buffers=(r"^(text|vision)_model\.embeddings\.position_ids$",),
    template="{bos} $A {eos}",
    pair_template="{bos} $A {eos} $B {eos}",
)


def _read_projection(hf: Config) -> dict[str, Any]:
    text_embed = hf.get("text_config.hidden_size", _SIZES["hidden_size"])
    return {"projection_dim": hf.get("text_config.projection_size", text_embed)}


_SIGLIP = dataclasses.replace(
    _CLIP,
    name="SiglipModel",
    family="SigLIP",
    tried=("google/siglip-base-patch16-224",),
    model_type="siglip",
    keys=(
        *_keys(
            _SIZES
            | {
                "intermediate_size": 3072,
                "patch_size": 16,
                "vocab_size": 32000,
                "positions": 64,
                "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-6,
            }
        ),
        Keys(
            ("text_config.projection_size",),
            _read_projection,
            lambda fields: {"text_config.projection_size": fields["projection_dim"]},
        ),
        Only("vision_config.vision_use_head", (True,)),
    ),
    rows=(
        *_BODY,
        *_attention_pool("pool", "vision_model.head"),
        *linear("text_projection", "text_model.head"),
        Row("logit_scale", "logit_scale"),
        Row("logit_bias", "logit_bias"),
    ),
    fields={"pool": "attention", "text_pool": "last", "eos_id": None, "contrast": "sigmoid"},
    template="$A {eos}",
    pair_template="$A {eos} $B {eos}",
)


def _flat(section: str, names: Mapping[str, Any]) -> tuple[Key, ...]:
    """Return the keys of one encoder's config.json, which has no sections.

    Args:
        section: key of `_CLIP`'s section with the same keys.
        names: further keys, and their values if they are absent.
    """
    sizes = {
        "num_hidden_layers": ("num_layers", 12),
        "num_attention_heads": ("num_heads", 12 if section == "vision_config" else 8),
        "hidden_size": ("embed_dim", 768 if section == "vision_config" else 512),
        "intermediate_size": ("mlp_dim", 3072 if section == "vision_config" else 2048),
        "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
        "initializer_range": ("init_stddev", 0.02),
    }
    return (
        *(Key(theirs, ours, default) for theirs, (ours, default) in sizes.items()),
        *(Key(theirs, theirs, default) for theirs, default in names.items()),
        Key("hidden_act", "activation", "quick_gelu", ACTIVATIONS),
    )


_IMAGE_BODY = (
    Row("patch_embedding.linear.kernel", f"{_PATCHES}.weight", "conv2d", num_inputs=3),
    Row("class_token", "vision_model.embeddings.class_embedding", "flat"),
    Row("position_embedding", "vision_model.embeddings.position_embedding.weight", "one"),
    *norm("first_norm", "vision_model.pre_layrnorm"),
    *_blocks("encoder", "vision_model"),
    *norm("final_norm", "vision_model.post_layernorm"),
)
_TEXT_BODY = (
    Row("token_embedding", "text_model.embeddings.token_embedding.weight", "vocab"),
    Row("position_embedding", "text_model.embeddings.position_embedding.weight"),
    *_blocks("decoder", "text_model"),
    *norm("final_norm", "text_model.final_layer_norm"),
)
_FLAT_HARMLESS = ("attention_dropout", "dropout", "initializer_factor")
_IMAGE_KEYS = _flat("vision_config", {"image_size": 224, "patch_size": 32, "num_channels": 3})
_TEXT_KEYS = (
    *_flat("text_config", {"vocab_size": 49408}),
    Key("max_position_embeddings", "max_positions", 77),
)
_IMAGE = Architecture(
    name="CLIPVisionModelWithProjection",
    family="CLIP, one encoder",
    model_type="clip_vision_model",
    model="vit",
    model_class=ViT,
    keys=(*_IMAGE_KEYS, Key("projection_dim", "num_labels", 512)),
    rows=(*_IMAGE_BODY, Row("classifier.kernel", "visual_projection.weight")),
    prefix="vision_model.",
    fields={"head": "labels", "first_norm": True, "patch_bias": False, "classifier_bias": False},
    harmless=_FLAT_HARMLESS,
    buffers=(r"^(vision_model\.)?embeddings\.position_ids$",),
    other_heads=(r"text_model\.", r"text_projection\.", r"logit_scale$"),
)
_TEXT = Architecture(
    name="CLIPTextModelWithProjection",
    family="CLIP, one encoder",
    model_type="clip_text_model",
    model="opt",
    model_class=OPT,
    keys=(*_TEXT_KEYS, Key("projection_dim", "projection_dim", 512)),
    rows=(*_TEXT_BODY, Row("project_out.kernel", "text_projection.weight")),
    prefix="text_model.",
    fields={"head": "none", "first_position": 0},
    harmless=(*_FLAT_HARMLESS, "eos_token_id"),
    buffers=(r"^(text_model\.)?embeddings\.position_ids$",),
    other_heads=(r"vision_model\.", r"visual_projection\.", r"logit_scale$"),
    template="{bos} $A {eos}",
    pair_template="{bos} $A {eos} $B {eos}",
)
_PROJECTION = (*_FLAT_HARMLESS, "projection_dim")

ARCHITECTURES = (
    _CLIP,
    _SIGLIP,
    dataclasses.replace(_IMAGE, keys=_IMAGE_KEYS, rows=_IMAGE_BODY).base(
        "CLIPVisionModel",
        harmless=_PROJECTION,
        other_heads=(*_IMAGE.other_heads, r"visual_projection\."),
    ),
    _IMAGE,
    dataclasses.replace(_TEXT, keys=_TEXT_KEYS, rows=_TEXT_BODY).base(
        "CLIPTextModel",
        harmless=(*_PROJECTION, "eos_token_id"),
        other_heads=(*_TEXT.other_heads, r"text_projection\."),
    ),
    _TEXT,
)
