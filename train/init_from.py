"""A run that starts from the parameters of a checkpoint: `init_from`."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from convert.source import Source, load_params
from data.config import IMAGE_OBJECTIVES
from sharding.memory import in_device_memory
from train.setup import Run

#: Keys of `model` that the run decides, whatever the checkpoint was trained with.
OF_THE_RUN = ("dropout", "head", "loss", "num_labels", "vocab_multiple")
#: The layer whose outputs are a task's labels.
_OF_A_TASK = "classifier"
#: `data.tokenizer`: the checkpoint's.
INIT_FROM = "init_from"

Tree = Any

_log = logging.getLogger(__name__)


def take_over(config: Any, source: Source, overrides: Sequence[str]) -> None:
    """Sets the model's sizes and, of a text, the tokenizer to those of a checkpoint.

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
    model = config.model
    name = model.get("name")
    if name not in (None, source.model):
        raise ValueError(
            f"config.model.name={name!r}, but init_from={config.init_from!r} holds a "
            f"{source.model}; take a config for that, or leave model.name out"
        )
    of_checkpoint = {"name": source.model, **dataclasses.asdict(source.config)}
    if model.get("head") not in (None, of_checkpoint.get("head")):
        of_checkpoint.pop("num_labels", None)  # Those of another task.
    for key, value in of_checkpoint.items():
        own = model.get(key)
        if key in OF_THE_RUN and own is not None:
            continue
        if f"model.{key}" in by_hand and own != value:
            raise ValueError(
                f"--config.model.{key}={own!r}, but in init_from={config.init_from!r} it is "
                f"{value!r}; leave it out"
            )
        with config.unlocked(), config.ignore_type():
            model[key] = value
    if config.data.get("objective") in IMAGE_OBJECTIVES:
        return
    if "data.tokenizer" in by_hand and config.data.tokenizer != INIT_FROM:
        return
    if source.tokenizer is None:
        raise ValueError(
            f"init_from={config.init_from!r} holds no tokenizer.json; set data.tokenizer to the "
            "path of the one that the model was trained with"
        )
    config.data.tokenizer = str(source.tokenizer)


def start_params(run: Run, source: Source, labels: Sequence[object] = ()) -> Tree:
    """Returns the parameters to start from, as `run.state.portable.params` lays them out.

    They are the checkpoint's; those of a head that it lacks, or has for another task, are new.

    Args:
        labels: those of the data, in order; a classifier's are brought to this order.

    Raises:
        ValueError: the checkpoint has other parameters, shapes or labels.
    """
    wanted = _flat(run.state.portable.params)
    there = _flat(nnx.to_pure_dict(nnx.split(source.abstract())[1]))
    heads = [getattr(config, "head", None) for config in (source.config, run.model_config)]
    new = []
    if heads[0] != heads[1]:
        new = [path for path in sorted(wanted) if path not in there or path[0] == _OF_A_TASK]
    left_out = sorted(there.keys() - wanted)
    for what, paths in (("new", new), ("left out", left_out)):
        if paths:
            _log.info("init_from: %s: %s", what, ", ".join(".".join(path) for path in paths))
    old = {path: leaf for path, leaf in wanted.items() if path not in new}
    params = _flat(load_params(source, nnx.traversals.unflatten_mapping(old)))
    if new:
        params |= _fresh(run, new)
    elif labels and source.labels:
        order = _order(labels, source)
        for path in params.keys() & {(_OF_A_TASK, "kernel"), (_OF_A_TASK, "bias")}:
            sharding = wanted[path].sharding
            leaf = jax.device_put(params[path], in_device_memory(sharding))
            params[path] = jax.device_put(leaf[..., order], sharding)
    return nnx.traversals.unflatten_mapping(params)


def _order(labels: Sequence[object], source: Source) -> np.ndarray:
    """Returns the number in the checkpoint of each label of the data."""
    known, own = list(source.labels), [str(label) for label in labels]
    if sorted(known) != sorted(own):
        raise ValueError(
            f"init_from={source.path} tells the labels {', '.join(known)} from each other, and the "
            f"data has {', '.join(own)}; rename the data's, or set config.model.head to another "
            "and train a new classifier from the checkpoint before this one"
        )
    return np.array([known.index(label) for label in own])


def _fresh(run: Run, paths: Sequence[tuple]) -> dict[tuple, jax.Array]:
    """Returns what the run would start with of these parameters, without a checkpoint."""
    wanted = _flat(run.state.portable.params)

    def make():
        params = _flat(nnx.to_pure_dict(nnx.split(run.build())[1]))
        return {path: params[path].astype(wanted[path].dtype) for path in paths}

    return jax.jit(make, out_shardings={path: wanted[path].sharding for path in paths})()


def _flat(params: Tree) -> dict[tuple, Any]:
    return dict(nnx.traversals.flatten_mapping(params))
