"""The registry of Hugging Face architectures that can be converted."""

from collections.abc import Mapping
from typing import Any

from convert.architecture import Architecture
from convert.families import (
    bert,
    clip,
    deit,
    distilbert,
    electra,
    experts,
    gpt2,
    llama,
    mae,
    modernbert,
    opt,
    swin,
    t5,
    vit,
)

_FAMILIES = (
    gpt2,
    opt,
    llama,
    experts,
    bert,
    distilbert,
    electra,
    modernbert,
    t5,
    vit,
    deit,
    swin,
    mae,
    clip,
)

_OLD_NAMES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name. The first one of each model_type is its default."""
    return {a.name: a for family in _FAMILIES for a in family.ARCHITECTURES}


def find(hf: Mapping[str, Any]) -> Architecture:
    """Find the architecture that a config.json names, or else the default of its model_type.

    Raises:
        ValueError: The architecture is not supported.
    """
    known = architectures()
    names = hf.get("architectures") or []
    model_type = hf.get("model_type")
    names = [_OLD_NAMES.get(name, name) for name in names]
    if not names:
        names = [a.name for a in known.values() if a.model_type == model_type][:1]
    if len(names) != 1 or names[0] not in known:
        raise ValueError(
            f"config.json has architectures={hf.get('architectures')} and "
            f"model_type={model_type!r}, which is not supported; the supported architectures are "
            f"{', '.join(known)}"
        )
    return known[names[0]]
