"""Keys and weight names of Swin and Swin V2.

A stage here is a stack of pairs of blocks: the `first` one has plain windows and the `second` one
shifted windows. In the Hugging Face model these are the even and the odd blocks of the stage, which
is expressed by a `Row` with `first` = 0 or 1 and `step` = 2.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from convert.architecture import Architecture
from convert.families.vit import IMAGE_KEYS, LAYER_MODULES, NORMS, patches, side
from convert.keys import NUM_LABELS, Config, Key, Keys, Only
from convert.names import Row, linear, norm
from models.vision.swin import MAX_STAGES, Swin, SwinConfig

#: Linear layer of a block here -> its name in the Hugging Face model.
_LINEARS = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "bias.up": "attention.self.continuous_position_bias_mlp.0",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_MODULES = (
    *LAYER_MODULES,
    (
        r"\battention\.self\.relative_position_bias_table\b",
        "attention.relative_position_bias.relative_position_bias_table",
    ),
)


def _stage(base: str, stage: int) -> tuple[Row, ...]:
    """Return the rows of a stage, and of the patch merging before it."""
    rows: list[Row] = []
    theirs = f"{base}.encoder.layers.{stage}.blocks.{{layer}}"
    for first, block in enumerate(("first", "second")):
        ours = f"stage{stage}.layers.{block}"
        every: dict[str, Any] = {"first": first, "step": 2}
        table = "relative_position_bias_table"
        scale = "logit_scale"
        rows += [
            Row(f"{ours}.bias.table", f"{theirs}.attention.self.{table}", **every),
            Row(f"{ours}.attention.q_norm.log_scale", f"{theirs}.attention.self.{scale}", **every),
        ]
        of_bias = f"{theirs}.attention.self.continuous_position_bias_mlp"
        rows.append(Row(f"{ours}.bias.down.kernel", f"{of_bias}.2.weight", **every))
        for a, b in _LINEARS.items():
            rows += linear(f"{ours}.{a}", f"{theirs}.{b}", **every)
        out = f"{theirs}.attention.output.dense"
        rows += linear(f"{ours}.attention.out", out, num_inputs=2, **every)
        for a, b in NORMS.items():
            rows += norm(f"{ours}.{a}", f"{theirs}.{b}", **every)
    downsample = f"{base}.encoder.layers.{stage - 1}.downsample"
    if stage:
        rows.append(Row(f"merging{stage}.reduction.kernel", f"{downsample}.reduction.weight"))
        rows += norm(f"merging{stage}.norm", f"{downsample}.norm")
    return tuple(rows)


def _body(base: str) -> tuple[Row, ...]:
    return (
        *patches("patch_embedding", f"{base}.embeddings"),
        *norm("embedding_norm", f"{base}.embeddings.norm"),
        *(row for stage in range(MAX_STAGES) for row in _stage(base, stage)),
        *norm("final_norm", f"{base}.layernorm"),
    )


def _list(theirs: str, ours: str, default: tuple[int, ...]) -> Keys:
    """Return a key whose value is a list.

    Args:
        theirs: key.
        ours: field.
        default: value if the key is absent.
    """
    return Keys(
        (theirs,),
        lambda hf: {ours: _tuple(hf, theirs) or default},
        lambda fields: {theirs: list(fields[ours])},
    )


def _tuple(hf: Config, name: str) -> Any:
    """Return a list as a tuple, and any other value unchanged; `check_types` refuses it later."""
    value = hf.get(name)
    return tuple(value) if isinstance(value, list) else value


def _write_sizes(fields: Config) -> dict[str, int]:
    """Return keys of config.json that repeat information from other keys."""
    num_stages = len(fields["depths"])
    return {"hidden_size": fields["embed_dim"] * 2 ** (num_stages - 1), "num_layers": num_stages}


def _large_windows(config: SwinConfig) -> Iterator[str]:
    """Yield the first stage that is smaller than its windows.

    The first version's class in transformers always has a table for a whole window.
    """
    for stage in range(config.num_stages):
        side = config.side(stage)
        if side < config.window_size:
            yield (
                f"model.window_size={config.window_size} in stage {stage}, which has only "
                f"{side} × {side} patches (use a smaller window, larger images, or model.version=2)"
            )
            return


def _read_pretrained(hf: Config) -> dict[str, tuple[int, ...]]:
    sides = _tuple(hf, "pretrained_window_sizes") or ()
    is_none = isinstance(sides, tuple) and not any(sides)
    return {"pretrained_windows": () if is_none else sides}


def _write_pretrained(fields: Config) -> dict[str, list[int]]:
    sides = fields["pretrained_windows"] or (0,) * len(fields["depths"])
    return {"pretrained_window_sizes": list(sides)}


_KEYS = (
    *IMAGE_KEYS,
    side("patch_size", 4),
    Key("embed_dim", "embed_dim", 96),
    _list("depths", "depths", (2, 2, 6, 2)),
    _list("num_heads", "num_heads", (3, 6, 12, 24)),
    Key("window_size", "window_size", 7),
    Key("mlp_ratio", "mlp_ratio", 4.0),
    Key("drop_path_rate", "drop_path", 0.1),
    Key("layer_norm_eps", "layer_norm_epsilon", 1e-5),
    Keys(("hidden_size", "num_layers"), lambda hf: {}, _write_sizes),
    Only("use_absolute_embeddings", (False,)),
)
_PRETRAINED = Keys(("pretrained_window_sizes",), _read_pretrained, _write_pretrained)

_SWIN = Architecture(
    name="SwinForImageClassification",
    family="Swin",
    model_type="swin",
    model="swin",
    model_class=Swin,
    keys=(*_KEYS, NUM_LABELS),
    rows=(*_body("swin"), *linear("classifier", "classifier")),
    prefix="swin.",
    fields={"version": 1},
    harmless=(
        "attention_probs_dropout_prob",
        "encoder_stride",
        "problem_type",
        "out_features",
        "out_indices",
        "stage_names",
        "path_norm",
    ),
    buffers=(r"relative_position_index$", r"relative_coords_table$"),
    other_heads=(r".*embeddings\.mask_token", r"decoder\."),
    limits=_large_windows,
    module_names=_MODULES,
)
_SWIN_2 = dataclasses.replace(
    _SWIN,
    name="Swinv2ForImageClassification",
    family="Swin V2",
    model_type="swinv2",
    keys=(*_KEYS, _PRETRAINED, NUM_LABELS),
    rows=(*_body("swinv2"), *linear("classifier", "classifier")),
    prefix="swinv2.",
    fields={"version": 2},
    limits=None,
    module_names=(),
)
_HEADLESS = {"other_heads": (*_SWIN.other_heads, r"classifier\.")}
ARCHITECTURES = (
    _SWIN,
    dataclasses.replace(_SWIN, keys=_KEYS).base("SwinModel", **_HEADLESS),
    _SWIN_2,
    dataclasses.replace(_SWIN_2, keys=(*_KEYS, _PRETRAINED)).base("Swinv2Model", **_HEADLESS),
)
