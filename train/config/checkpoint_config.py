"""What a run takes over of the config of the checkpoint that it starts from: `init_from`."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from ml_collections import ConfigDict

from convert import preprocessor
from convert.source import Source
from data.config import IMAGE_OBJECTIVES
from train.config.schema import find_model

#: Keys of `model` that the run decides, whatever the checkpoint was trained with.
OF_THE_RUN = (
    *("drop_path", "dropout", "head", "label_smoothing", "loss", "mask_ratio"),
    *("normalise_targets", "temperature", "vocab_multiple"),
)
#: Those that are the data's, or the run's.
_OF_THE_DATA = ("image_size", "num_labels")
#: Those that only a head reads: the run's, if the checkpoint's head is not taken.
_OF_A_HEAD = ("pool",)
#: `data.tokenizer`: the checkpoint's.
INIT_FROM = "init_from"


def inherit_config(config: Any, source: Source, overrides: Sequence[str]) -> None:
    """Sets the model's sizes and, of a text, the tokenizer to those of a checkpoint.

    The model is the checkpoint's, or the encoder that a pre-training such as MAE has.

    Args:
        config: a ConfigDict; changed in place. What a config file says of the model gives way.
        overrides: `section.key=value` from the command line; they do not give way.

    Raises:
        ValueError: the command line asks for what the checkpoint is not, or the config is for
            another model, or the checkpoint has no tokenizer for a text.
    """
    by_hand = {override.partition("=")[0] for override in overrides}
    if "model" not in config:
        with config.unlocked():
            config.model = ConfigDict()
    _take_model(config, source, by_hand)
    if config.data.get("objective") not in IMAGE_OBJECTIVES:
        _take_tokenizer(config, source, by_hand)


def _take_model(config: Any, source: Source, by_hand: Collection[str]) -> None:
    model = config.model
    name, theirs = _counterpart(config, source)
    of_checkpoint = {"name": name, **dataclasses.asdict(theirs)}
    has_other_head = model.get("head") not in (None, of_checkpoint.get("head"))
    if has_other_head or config.train.get("init_labels") == "new":
        of_checkpoint = {k: v for k, v in of_checkpoint.items() if k not in _OF_A_HEAD}
    for key, value in of_checkpoint.items():
        own, is_by_hand = model.get(key), f"model.{key}" in by_hand
        is_of_the_run = key in OF_THE_RUN or (
            key in preprocessor.FIELDS and _leaves_open(source, key)
        )
        if key in _OF_THE_DATA or (is_of_the_run and own is not None):
            continue
        if is_by_hand and _plain(own) != _plain(value):
            raise ValueError(
                f"--config.model.{key}={own!r}, but in init_from={config.init_from!r} it is "
                f"{value!r}; leave it out"
            )
        with config.unlocked(), config.ignore_type():
            model[key] = value


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _leaves_open(source: Source, key: str) -> bool:
    """Returns whether a checkpoint does not say what it was trained with."""
    return source.architecture is not None and key not in source.fields


def _counterpart(config: Any, source: Source) -> tuple[str, Any]:
    """Returns (`model.name`, its config) of what a run takes of a checkpoint: all, or its encoder.

    A model whose config has an `encoder`, the config of another model, has that one's parameters
    under the same names.
    """
    name, encoder = config.model.get("name"), getattr(source.config, "encoder", None)
    if name in (None, source.model):
        return source.model, source.config
    if dataclasses.is_dataclass(encoder) and isinstance(encoder, find_model(name).Config):
        return name, encoder
    raise ValueError(
        f"config.model.name={name!r}, but init_from={config.init_from!r} holds a "
        f"{source.model}; take a config for that, or leave model.name out"
    )


def _take_tokenizer(config: Any, source: Source, by_hand: Collection[str]) -> None:
    if "data.tokenizer" in by_hand and config.data.tokenizer != INIT_FROM:
        return
    if source.tokenizer is None:
        raise ValueError(
            f"init_from={config.init_from!r} holds no tokenizer.json; set data.tokenizer to the "
            "path of the one that the model was trained with"
        )
    config.data.tokenizer = str(source.tokenizer)
