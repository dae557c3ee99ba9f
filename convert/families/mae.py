"""Keys and weight names of MAE."""

import dataclasses

from convert.architecture import Architecture
from convert.families.vit import BODY, HARMLESS, KEYS, MODULES, blocks
from convert.keys import Key
from convert.names import Row, linear, norm
from models.vision.mae import MAE
from models.vision.vit import ViT

_BLOCKS = "decoder.decoder_layers.{layer}"
#: The names that transformers 5 writes; published files have the names above.
_OTHER_BLOCKS = "decoder.decoder_encoder.layer.{layer}"


def _decoder_blocks() -> tuple[Row, ...]:
    rows = blocks("decoder", _BLOCKS)
    others = (row.theirs.replace(_BLOCKS, _OTHER_BLOCKS) for row in rows)
    return tuple(dataclasses.replace(r, tied=(o,)) for r, o in zip(rows, others, strict=True))


_DECODER = (
    *linear("decoder_embedding", "decoder.decoder_embed"),
    Row("mask_token", "decoder.mask_token"),
    Row("decoder_position_embedding", "decoder.decoder_pos_embed"),
    *_decoder_blocks(),
    *norm("decoder_norm", "decoder.decoder_norm"),
    *linear("prediction", "decoder.decoder_pred"),
)
_DECODER_KEYS = (
    Key("decoder_num_hidden_layers", "decoder_num_layers", 8),
    Key("decoder_num_attention_heads", "decoder_num_heads", 16),
    Key("decoder_hidden_size", "decoder_embed_dim", 512),
    Key("decoder_intermediate_size", "decoder_mlp_dim", 2048),
    Key("mask_ratio", "mask_ratio", 0.75),
    Key("norm_pix_loss", "normalise_targets", False),
)

ARCHITECTURES = (
    Architecture(
        name="ViTMAEForPreTraining",
        family="MAE",
        model_type="vit_mae",
        model="mae",
        model_class=MAE,
        keys=(*KEYS, *_DECODER_KEYS),
        rows=(*BODY, *_DECODER),
        prefix="vit.",
        harmless=HARMLESS,
        module_names=MODULES,
    ),
    # The base model is imported as a ViT, which sees all patches; hiding patches is part of
    # pre-training only.
    Architecture(
        name="ViTMAEModel",
        family="MAE",
        model_type="vit_mae",
        model="vit",
        model_class=ViT,
        keys=KEYS,
        rows=BODY,
        prefix="vit.",
        is_base=True,
        fields={"head": "none"},
        harmless=(*HARMLESS, *(key.theirs for key in _DECODER_KEYS)),
        other_heads=(r"decoder\.",),
        module_names=MODULES,
    ),
)
