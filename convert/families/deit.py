"""Keys and weight names of DeiT, a ViT with a distillation token."""

import dataclasses

from convert.architecture import Architecture, detect_pooler
from convert.families.vit import HARMLESS, KEYS, MODULES, body
from convert.keys import NUM_LABELS, Only
from convert.names import Row, linear
from models.vision.vit import ViT

_BODY = (*body("deit"), Row("distillation_token", "deit.embeddings.distillation_token"))
_OTHERS = (r"(deit\.)?embeddings\.mask_token", r"decoder\.")
_POOLER = r"(deit\.)?pooler\."

_DEIT = Architecture(
    name="DeiTForImageClassification",
    family="DeiT",
    model_type="deit",
    model="vit",
    model_class=ViT,
    keys=(*KEYS, NUM_LABELS),
    rows=(*_BODY, *linear("classifier", "classifier")),
    prefix="deit.",
    fields={"distillation": "token"},
    harmless=(*HARMLESS, "pooler_act", "pooler_output_size"),
    other_heads=(*_OTHERS, _POOLER, r"(cls|distillation)_classifier\."),
    module_names=MODULES,
)
ARCHITECTURES = (
    _DEIT,
    dataclasses.replace(
        _DEIT,
        name="DeiTForImageClassificationWithTeacher",
        tried=("facebook/deit-base-distilled-patch16-224",),
        rows=(
            *_BODY,
            *linear("classifier", "cls_classifier"),
            *linear("distillation_classifier", "distillation_classifier"),
        ),
        fields={"distillation": "classifier"},
        other_heads=(*_OTHERS, _POOLER, r"classifier\."),
    ),
    dataclasses.replace(
        _DEIT,
        keys=(*KEYS, Only("pooler_act", ("tanh",))),
        rows=(*_BODY, *linear("pooler", "deit.pooler.dense")),
    ).base(
        "DeiTModel",
        detect=detect_pooler,
        detected_fields=("use_pooler",),
        harmless=(*HARMLESS, "pooler_output_size"),
        other_heads=(*_OTHERS, r"((cls|distillation)_)?classifier\."),
    ),
)
