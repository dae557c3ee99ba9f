"""Inherits model settings from the checkpoint that a run starts from (`init_from`).

Keys that shape the parameters come from the checkpoint, so that any config of the same model fits.
Keys that only affect training, such as dropout, stay with the run.
"""

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from checkpoint.run_copies import is_run_url
from convert.files import preprocessor
from convert.hub_commits import base_commits
from convert.options import DEFAULTS, ReadOptions
from convert.source import Source, read_source
from convert.upcycling import FIELDS, check_fields, upcycles
from data.config import IMAGE_OBJECTIVES
from fields.paths import check_local
from models.registry import find_model
from train.config.overrides import Overrides
from train.config.schema import checked_value
from untrusted.hub import model_of

#: Keys of `model` that the run sets; the checkpoint's values are ignored.
OF_THE_RUN = (
    "balancing_rate",
    "drop_path",
    "dropout",
    "head",
    "label_smoothing",
    "loss",
    "mask_ratio",
    "mtp_depths",
    "mtp_loss",
    "normalise_targets",
    "router_loss",
    "router_loss_over",
    "router_z_loss",
    "temperature",
    "vocab_multiple",
)
#: Keys of `model` that the data or the run set.
_OF_THE_DATA = ("image_size", "num_labels")
#: Keys of `model` that the command line may change for rotary positions, which have no parameters:
#: a run may have longer sequences than the checkpoint was trained with.
_OF_ROTARY_POSITIONS = ("max_positions", "rope_scaling", "rope_theta")
#: Keys of `model` that only a head reads. The run sets them if it does not use the checkpoint's
#: head.
_OF_A_HEAD = ("pool",)
#: Learning rates from here on would destroy what published text models have learned.
_RATE_FROM_SCRATCH = 1e-3
#: Longest sequence, in tokens, that `data.sequence_length=0` stands for.
_LONGEST = 4096
#: Value of `data.tokenizer` that stands for the checkpoint's tokenizer.
INIT_FROM = "init_from"

_log = logging.getLogger(__name__)


def take_init_from(
    config: Any, overrides: Overrides, options: ReadOptions = DEFAULTS
) -> Source | None:
    """Open the checkpoint that a config starts from, and copy its model settings into the config.

    Args:
        config: ConfigDict, changed in place; see `inherit_config`.
        overrides: overrides of the command line, which are never replaced.
        options: options of the command line. The checkpoint's config may also import paths that the
            user names on the command line or in a config.py. `harmless` comes from the config.

    Returns:
        The checkpoint, or None if `init_from` is not set.

    Raises:
        ValueError: see `inherit_config` and `convert.source.read_source`.
    """
    path = config.get("init_from")
    if not path:
        return None
    if not is_run_url(path):
        check_local("init_from", path)
    options = dataclasses.replace(
        options,
        harmless=checked_value(config, "train.init_harmless"),
        hub_commits=base_commits(config),
        harmless_option="--config.train.init_harmless",
    )
    source = read_source(path, options)
    inherit_config(config, source, overrides)
    return source


def inherit_config(config: Any, source: Source, overrides: Overrides) -> None:
    """Copy the model's sizes, and for text the tokenizer, from a checkpoint into the config.

    The run's model is the checkpoint's model, or the encoder of a pretraining model such as MAE.

    Args:
        config: ConfigDict, changed in place. The checkpoint's values replace values from the
            config file.
        source: checkpoint.
        overrides: overrides of the command line, which are never replaced: one that contradicts
            the checkpoint is an error.

    Raises:
        ValueError: an override contradicts the checkpoint, the config is for another model, or a
            text run's checkpoint has no tokenizer.
    """
    overridden = overrides.command_line_keys
    if "model" not in config:
        with config.unlocked():
            config.model = ConfigDict()
    _take_model(config, source, overridden)
    if config.data.get("objective") not in IMAGE_OBJECTIVES:
        _take_tokenizer(config, source, overridden)
        _take_length(config, source)
        if source.architecture is not None:
            _warn_of_settings_for_random_weights(config, overridden)


def _take_model(config: Any, source: Source, overridden: Collection[str]) -> None:
    model = config.model
    name, theirs = _counterpart(config, source)
    checkpoint_values = {"name": name, **dataclasses.asdict(theirs)}
    # Experts that the checkpoint lacks are the run's: they start as copies of its MLPs.
    are_copied = upcycles(model.get("num_experts"), theirs)
    if are_copied:
        checkpoint_values = {k: v for k, v in checkpoint_values.items() if k not in FIELDS}
    has_other_head = model.get("head") not in (None, checkpoint_values.get("head"))
    if has_other_head or config.train.get("init_labels") == "new":
        checkpoint_values = {k: v for k, v in checkpoint_values.items() if k not in _OF_A_HEAD}
    for key, value in checkpoint_values.items():
        configured_value = model.get(key)
        is_overridden = f"model.{key}" in overridden
        is_of_the_run = key in OF_THE_RUN or (
            key in preprocessor.FIELDS and _leaves_open(source, key)
        )
        stretches = is_overridden and key in _OF_ROTARY_POSITIONS and hasattr(theirs, "rope_theta")
        if key in _OF_THE_DATA or stretches or (is_of_the_run and configured_value is not None):
            continue
        if is_overridden and _plain(configured_value) != _plain(value):
            raise ValueError(
                f"--config.model.{key}={configured_value!r}, but the checkpoint "
                f"init_from={config.init_from!r} has {value!r}; omit this override"
            )
        with config.unlocked(), config.ignore_type():
            model[key] = value
    if are_copied:
        check_fields(model, theirs, config.init_from)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _leaves_open(source: Source, key: str) -> bool:
    """Return whether a Hugging Face checkpoint does not state its value of a key."""
    return source.architecture is not None and key not in source.fields


def _counterpart(config: Any, source: Source) -> tuple[str, Any]:
    """Return (`model.name`, model config) of the part of a checkpoint that the run uses.

    That part is the whole model, or its encoder. A pretraining model has an `encoder` in its
    config, which is the config of another model. The parameters have the same names in both.
    """
    name = config.model.get("name")
    encoder = getattr(source.config, "encoder", None)
    if not name or name == source.model:
        return source.model, source.config
    if dataclasses.is_dataclass(encoder) and isinstance(encoder, find_model(name).Config):
        return name, encoder
    raise ValueError(
        f"config.model.name={name!r}, but init_from={config.init_from!r} contains a "
        f"{source.model}; use a config for that model, or do not set model.name"
    )


def _take_length(config: Any, source: Source) -> None:
    if config.data.get("sequence_length") != 0:
        return
    longest = getattr(source.config, "max_positions", _LONGEST)  # T5 has no longest sequence
    config.data.sequence_length = min(longest, _LONGEST)
    if longest > _LONGEST:
        _log.info(
            "data.sequence_length=%d: the model supports %d; set it for longer texts",
            _LONGEST,
            longest,
        )


def _warn_of_settings_for_random_weights(config: Any, overridden: Collection[str]) -> None:
    rate = config.optimizer.learning_rate
    if "optimizer.learning_rate" in overridden or rate < _RATE_FROM_SCRATCH:
        return
    _log.warning(
        "optimizer.learning_rate=%g is for weights that start at random; published ones are "
        "usually tuned with 1e-5 to 5e-5, and adapters with 2e-4. configs/opt_finetune.py and "
        "configs/chat_finetune.py have such settings",
        rate,
    )


def _take_tokenizer(config: Any, source: Source, overridden: Collection[str]) -> None:
    if "data.tokenizer" in overridden and config.data.tokenizer != INIT_FROM:
        return
    if source.tokenizer is None:
        if config.data.tokenizer not in ("bpe", "bytes", INIT_FROM):
            return  # the config file names one, such as the config.yaml of a run
        raise ValueError(
            f"init_from={config.init_from!r} has neither a tokenizer.json nor a vocab.json with "
            "merges.txt; set data.tokenizer to the path of the tokenizer that the model was "
            "trained with"
        )
    directory = source.adapter_files or source.hf_files
    is_of_hub = model_of(config.init_from) is not None
    if is_of_hub and directory is not None and source.tokenizer.is_relative_to(directory):
        config.data.tokenizer = config.init_from  # the place of the cache is no part of a run
    else:
        config.data.tokenizer = str(source.tokenizer)
