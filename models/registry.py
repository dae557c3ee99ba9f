"""Maps the model names used in configs to classes."""

import dataclasses
import pkgutil
from typing import Any

from fields.numbers import shown
from untrusted.imports import import_object

#: `model.name` -> import path of the class.
MODELS = {
    "gpt2": "models.text.gpt2:GPT2",
    "opt": "models.text.opt:OPT",
    "llama": "models.text.llama:Llama",
    "bert": "models.text.bert:Bert",
    "modernbert": "models.text.modernbert:ModernBert",
    "t5": "models.text.t5:T5",
    "vit": "models.vision.vit:ViT",
    "swin": "models.vision.swin:Swin",
    "resmlp": "models.vision.resmlp:ResMLP",
    "mae": "models.vision.mae:MAE",
    "moco": "models.vision.moco:MoCo",
    "clip": "models.vision.clip:Clip",
}


def find_model(name: str) -> Any:
    """Return the model class for `model.name`.

    Args:
        name: key of MODELS, or an import path `package.module:Class`.

    Raises:
        ValueError: There is no such class, or it has no dataclass `Config`.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"model.name={shown(name)} must be a string; choose {', '.join(MODELS)}, or an import "
            "path"
        )
    if name in MODELS:
        return pkgutil.resolve_name(MODELS[name])
    model_class = import_object(name, "model.name", list(MODELS))
    if not dataclasses.is_dataclass(getattr(model_class, "Config", None)):
        raise ValueError(f"model.name={name!r}: the class must have a dataclass `Config`")
    return model_class
